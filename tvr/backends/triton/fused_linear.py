"""`fused_linear`: the kernels of `linear`, with a norm before the product or more behind it.

A decode step of a small model is bound by the weights' bytes, of which these are the most, and by
the gaps between kernels, of which they leave fewer. Every program norms x by itself: it is one row,
and in the L2 cache. Of 8 rows that took longer than a kernel of its own (docs/log.md).
"""

from __future__ import annotations

from torch import Tensor

from tvr.backends.triton.launch import Gpu
from tvr.backends.triton.linear import launcher
from tvr.contract import BoundOp, FusedLinearSpec


def bind_fused_linear(spec: FusedLinearSpec, gpu: Gpu) -> BoundOp:
    launch = launcher(spec, gpu)
    rms_norm, add = spec.rms_norm, spec.add

    def run(
        x: Tensor,
        packed: tuple[Tensor, Tensor | None],
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        """x [T, in] with T at most 1; out [T, out], half of that with silu_mul; it may be residual.

        What the spec does not ask for is left out, given or not.
        """
        launch(x, packed, out, norm_weight if rms_norm else None, residual if add else None, eps)
        return out

    return BoundOp(run=run)
