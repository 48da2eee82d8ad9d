"""The gated activation of the MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from tvr.contract import BoundOp, SiluMulSpec

if TYPE_CHECKING:
    from torch import Tensor


def bind_silu_mul(spec: SiluMulSpec) -> BoundOp:
    # On CPU, torch computes exp by vectors and by single values where a vector does not fit, and
    # the two differ in the last bit. Which elements those are depends on the number of rows.
    run = _run_by_row if spec.batch_invariant else _run
    return BoundOp(run=run)


def _run(x: Tensor, *, out: Tensor) -> Tensor:
    """out = silu(gate) * up, in fp32 and rounded once; x [T, 2I] is gate columns, then up."""
    gate, up = x.float().chunk(2, dim=-1)
    if out.dtype == torch.float32:
        return torch.mul(silu(gate), up, out=out)
    return out.copy_(silu(gate) * up)


def _run_by_row(x: Tensor, *, out: Tensor) -> Tensor:
    if x.is_cuda:  # one formula for every element, wherever it stands
        return _run(x, out=out)
    for x_row, out_row in zip(x, out, strict=True):
        _run(x_row, out=out_row)
    return out
