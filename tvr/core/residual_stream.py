"""The residual stream of a step, and the norm that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvr.contract import AddRmsNormSpec, RmsNormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.core.build_context import BuildContext


@dataclass(kw_only=True, slots=True)
class ResidualStream:
    """What every layer reads and adds to.

    An op that adds may do so at once. Where it does not, the sum waits for the next norm, which
    adds first: with two ops fewer a layer than with an add of its own.

    Attributes:
        residual: [T, hidden], the stream, but for `delta`.
        delta: [T, hidden], room for what is to be added.
        has_delta: whether `delta` is still to be added.
        normed: [T, hidden], room for a norm of the stream.
    """

    residual: Tensor
    delta: Tensor
    has_delta: bool
    normed: Tensor

    def normed_by(self, norm: RMSNorm) -> Tensor:
        """Return the norm of the whole stream."""
        if self.has_delta:
            norm.add(self.delta, self.residual, out=self.normed)
        else:
            norm(self.residual, out=self.normed)
        self.has_delta = False
        return self.normed


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight`, alone or after adding to the residual.

    Attributes:
        weight: [hidden].
        eps: of the mean square.
    """

    def __init__(self, ctx: BuildContext, weight: Tensor) -> None:
        self.weight = weight
        self.eps = ctx.config.rms_norm_eps
        size, invariant = weight.shape[0], ctx.batch_invariant
        norm = RmsNormSpec(dtype=ctx.dtype, batch_invariant=invariant, hidden_size=size)
        add_norm = AddRmsNormSpec(dtype=ctx.dtype, batch_invariant=invariant, hidden_size=size)
        self._norm = ctx.bind(norm).run
        self._add_norm = ctx.bind(add_norm).run

    def __call__(self, x: Tensor, *, out: Tensor) -> None:
        """x, out [rows, hidden]."""
        self._norm(x, self.weight, eps=self.eps, out=out)

    def add(self, x: Tensor, residual: Tensor, *, out: Tensor) -> None:
        """Add x to `residual` in place, then norm that; all [rows, hidden]."""
        self._add_norm(x, residual, self.weight, eps=self.eps, out=out, residual_out=residual)
