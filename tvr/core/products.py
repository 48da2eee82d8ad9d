"""The matrix products of a model, alone and with what stands before or behind them in a layer.

A product of few rows is bound by the bytes of its weight, and every kernel costs more to start than
it computes. So at `FUSED_ROWS` a norm, SiLU or the residual's add is part of the product's op,
`fused_linear`, wherever a backend serves that whole: composed of its parts it would be no faster
than the ops of larger steps, which have an op fewer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tvr.contract import AddRmsNormSpec, FusedLinearSpec, LinearSpec, SiluMulSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.core.build_context import BuildContext
    from tvr.core.parameters import LinearWeights
    from tvr.core.residual_stream import ResidualStream, RMSNorm

#: Up to this many rows a product goes to the op bound for small batches.
SMALL_BATCH_ROWS = 8

#: Up to this many rows it is fused: every program norms all rows, and of more that takes longer
#: than a kernel of its own (docs/log.md).
FUSED_ROWS = 1


class Linear:
    """`x @ weight.T (+ bias)`, by a small-batch op up to `SMALL_BATCH_ROWS` rows."""

    def __init__(self, ctx: BuildContext, weights: LinearWeights) -> None:
        spec = LinearSpec(**_shape(ctx, weights))
        self._general = _PackedLinear(ctx, spec, weights)
        self._small = self._general
        # Two ops round differently, so batch invariance allows only one.
        if not ctx.batch_invariant:
            self._small = _PackedLinear(ctx, replace(spec, max_rows=SMALL_BATCH_ROWS), weights)

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor:
        """x [rows, in], out [rows, out]."""
        op = self._small if len(x) <= SMALL_BATCH_ROWS else self._general
        return op(x, out=out)


class NormedLinear:
    """`linear(norm(x))` of the stream x."""

    def __init__(self, ctx: BuildContext, norm: RMSNorm, weights: LinearWeights) -> None:
        self._norm = norm
        self._linear = Linear(ctx, weights)
        self._fused = _fused(ctx, weights, norm.weight.shape[0], rms_norm=True)

    def __call__(self, x: ResidualStream, *, out: Tensor) -> None:
        """out [T, out]."""
        if self._fused is not None and _is_whole_and_small(x):
            self._fused(x.residual, norm_weight=self._norm.weight, eps=self._norm.eps, out=out)
        else:
            self._linear(x.normed_by(self._norm), out=out)


class GatedLinear:
    """`silu(gate(norm(x))) * up(norm(x))` of the stream x; gate and up are one weight."""

    def __init__(self, ctx: BuildContext, norm: RMSNorm, gate_up: LinearWeights) -> None:
        self._norm = norm
        self._gate_up = Linear(ctx.at("gate_up_proj"), gate_up)
        silu_mul = SiluMulSpec(
            dtype=ctx.dtype,
            batch_invariant=ctx.batch_invariant,
            intermediate_size=ctx.config.intermediate_size,
        )
        self._silu_mul = ctx.at("act_fn").bind(silu_mul).run
        hidden = norm.weight.shape[0]
        self._fused = _fused(ctx.at("gate_up_proj"), gate_up, hidden, rms_norm=True, silu_mul=True)

    def __call__(self, x: ResidualStream, *, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I]; scratch: gate_up [T, 2 * I]."""
        if self._fused is not None and _is_whole_and_small(x):
            self._fused(x.residual, norm_weight=self._norm.weight, eps=self._norm.eps, out=out)
        else:
            self._gate_up(x.normed_by(self._norm), out=gate_up)
            self._silu_mul(gate_up, out=out)


class AddedLinear:
    """`stream + linear(x)`: the sum is the new stream."""

    def __init__(self, ctx: BuildContext, weights: LinearWeights) -> None:
        self._linear = Linear(ctx, weights)
        self._fused = _fused(ctx, weights, weights.weight.shape[0], add=True)

    def __call__(self, x: Tensor, stream: ResidualStream) -> None:
        """x [T, in]."""
        if self.adds_at_once(len(x)):
            assert self._fused is not None
            self._fused(x, residual=stream.residual, out=stream.residual)
        else:
            self._linear(x, out=stream.delta)
            stream.has_delta = True

    def adds_at_once(self, num_rows: int) -> bool:
        """Whether a stream of so many rows has no delta afterwards."""
        return self._fused is not None and num_rows <= FUSED_ROWS


class _PackedLinear:
    """One bound product with the weight in the form that its backend asked for."""

    def __init__(self, ctx: BuildContext, spec: LinearSpec, weights: LinearWeights) -> None:
        bound = ctx.bind(spec)
        self._run = bound.run
        self._packed = (weights.weight, weights.bias)
        if bound.pack is not None:
            self._packed = bound.pack(weights.weight, weights.bias)

    def __call__(self, x: Tensor, **arguments: Any) -> Tensor:  # noqa: ANN401
        result: Tensor = self._run(x, self._packed, **arguments)
        return result


def _fused(
    ctx: BuildContext,
    weights: LinearWeights,
    hidden_size: int,
    *,
    rms_norm: bool = False,
    silu_mul: bool = False,
    add: bool = False,
) -> _PackedLinear | None:
    """Return `fused_linear` for few rows, if a backend serves it in place of its parts.

    It stands for a share of `add_rms_norm` too, which may be a better-ranked backend's. And its
    sums have an order of their own, so that a batch-invariant model has none.
    """
    spec = FusedLinearSpec(
        **_shape(ctx, weights),
        max_rows=FUSED_ROWS,
        rms_norm=rms_norm,
        silu_mul=silu_mul,
        add=add,
    )
    norm = AddRmsNormSpec(dtype=ctx.dtype, hidden_size=hidden_size)
    if ctx.batch_invariant or not ctx.ops.serves_whole(spec, instead_of=norm):
        return None
    return _PackedLinear(ctx, spec, weights)


def _is_whole_and_small(x: ResidualStream) -> bool:
    return not x.has_delta and len(x.residual) <= FUSED_ROWS


def _shape(ctx: BuildContext, weights: LinearWeights) -> dict[str, Any]:
    out_features, in_features = weights.weight.shape
    return {
        "dtype": ctx.dtype,
        "batch_invariant": ctx.batch_invariant,
        "in_features": in_features,
        "out_features": out_features,
        "bias": weights.bias is not None,
    }
