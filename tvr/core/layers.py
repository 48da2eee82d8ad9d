"""The parts of a decoder layer. Each binds its ops once and then only calls them.

T tokens, H query heads, KVH KV heads, D head_dim, I intermediate_size. Every output is allocated
by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tvr.contract import (
    AddRmsNormSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    BoundOp,
    LinearSpec,
    OpSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    SiluMulSpec,
)
from tvr.core.config import ModelConfig
from tvr.core.parameters import LinearWeights

if TYPE_CHECKING:
    from tvr.core.batch import ForwardBatch
    from tvr.core.ops import OpTable

#: Up to so many rows a product goes to an op that is bound for no more: where the bytes of the
#: weight are all that counts, and where they still count most.
SMALL_BATCH_ROWS, MEDIUM_BATCH_ROWS = 8, 128


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """What every part needs to bind its ops.

    `site` is where in the model the part stands, in the words of a checkpoint's tensor names.
    """

    ops: OpTable
    config: ModelConfig
    dtype: str
    block_size: int
    batch_invariant: bool
    site: str = ""

    def at(self, name: str) -> BuildContext:
        """Return the context of the part called `name` inside this one."""
        return replace(self, site=f"{self.site}.{name}" if self.site else name)

    def bind(self, spec: OpSpec) -> BoundOp:
        """Return the op bound for `spec` as this part is to call it."""
        return self.ops.bind_at(spec, self.site)


class Linear:
    """`x @ weight.T (+ bias)`, by an op bound for so many rows or some more."""

    def __init__(self, ctx: BuildContext, weights: LinearWeights) -> None:
        self.out_features, in_features = weights.weight.shape
        spec = LinearSpec(
            dtype=ctx.dtype,
            batch_invariant=ctx.batch_invariant,
            in_features=in_features,
            out_features=self.out_features,
            bias=weights.bias is not None,
        )
        self._general = _PackedLinear(ctx, spec, weights)
        self._small = self._medium = self._general
        # Two ops round differently, so batch invariance allows only one.
        if not ctx.batch_invariant:
            self._small = _PackedLinear(ctx, replace(spec, max_rows=SMALL_BATCH_ROWS), weights)
            self._medium = _PackedLinear(ctx, replace(spec, max_rows=MEDIUM_BATCH_ROWS), weights)

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor:
        """x [rows, in], out [rows, out]."""
        num_rows = x.shape[0]
        if num_rows <= SMALL_BATCH_ROWS:
            return self._small(x, out)
        return self._medium(x, out) if num_rows <= MEDIUM_BATCH_ROWS else self._general(x, out)


class _PackedLinear:
    """One bound product with the weight in the form that its backend asked for."""

    def __init__(self, ctx: BuildContext, spec: LinearSpec, weights: LinearWeights) -> None:
        bound = ctx.bind(spec)
        self._run = bound.run
        self._packed = (weights.weight, weights.bias)
        if bound.pack is not None:
            self._packed = bound.pack(weights.weight, weights.bias)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        result: Tensor = self._run(x, self._packed, out=out)
        return result


class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight`, alone or after adding to the residual."""

    def __init__(self, ctx: BuildContext, weight: Tensor) -> None:
        self._weight = weight
        self._eps = ctx.config.rms_norm_eps
        size, invariant = weight.shape[0], ctx.batch_invariant
        norm = RmsNormSpec(dtype=ctx.dtype, batch_invariant=invariant, hidden_size=size)
        add_norm = AddRmsNormSpec(dtype=ctx.dtype, batch_invariant=invariant, hidden_size=size)
        self._norm = ctx.bind(norm).run
        self._add_norm = ctx.bind(add_norm).run

    def __call__(self, x: Tensor, *, out: Tensor) -> None:
        """x, out [rows, hidden]."""
        self._norm(x, self._weight, eps=self._eps, out=out)

    def add(self, x: Tensor, residual: Tensor, *, out: Tensor) -> None:
        """Add x to `residual` in place, then norm that; all [rows, hidden]."""
        self._add_norm(x, residual, self._weight, eps=self._eps, out=out, residual_out=residual)


class Attention:
    """Rotate q and k, store k and v in the cache, attend to the cache."""

    def __init__(self, ctx: BuildContext, cos_sin_cache: Tensor) -> None:
        """cos_sin_cache: [max_position, D] fp32."""
        config = ctx.config
        self._cos_sin_cache = cos_sin_cache
        self._split = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        shape: dict[str, Any] = {
            "dtype": ctx.dtype,
            "batch_invariant": ctx.batch_invariant,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "block_size": ctx.block_size,
        }
        self._rope_kv_write = ctx.bind(RopeKvWriteSpec(**shape)).run
        self._decode = ctx.bind(AttentionDecodeSpec(**shape)).run
        self._prefill = ctx.bind(AttentionPrefillSpec(**shape)).run

    def __call__(
        self, qkv: Tensor, batch: ForwardBatch, kv: tuple[Tensor, Tensor], *, out: Tensor
    ) -> None:
        """qkv [T, (H + 2 * KVH) * D], rotated in place; kv: a layer's caches; out [T, H * D]."""
        heads = qkv.view(len(qkv), sum(self._split), self._head_dim)
        q, k, v = torch.split(heads, self._split, dim=1)  # [T, H, D], and [T, KVH, D] twice
        out = out.view(q.shape)
        self._rope_kv_write(
            q, k, v, batch.positions, self._cos_sin_cache, *kv, batch.slot_mapping, q_out=q, k_out=k
        )
        n = batch.num_decode_tokens  # decodes first, then prefill chunks
        if batch.decode is not None:
            self._decode(q[:n], *kv, batch.decode, scale=self._scale, out=out[:n])
        if batch.prefill is not None:
            self._prefill(q[n:], k[n:], v[n:], *kv, batch.prefill, scale=self._scale, out=out[n:])


class MLP:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, ctx: BuildContext, gate_up: LinearWeights, down: LinearWeights) -> None:
        self._gate_up = Linear(ctx.at("gate_up_proj"), gate_up)
        self._down = Linear(ctx.at("down_proj"), down)
        spec = SiluMulSpec(
            dtype=ctx.dtype,
            batch_invariant=ctx.batch_invariant,
            intermediate_size=ctx.config.intermediate_size,
        )
        self._silu_mul = ctx.at("act_fn").bind(spec).run

    def __call__(self, x: Tensor, *, gate_up: Tensor, product: Tensor, out: Tensor) -> None:
        """x, out [T, hidden]; scratch: gate_up [T, 2 * I], product [T, I]."""
        self._gate_up(x, out=gate_up)
        self._silu_mul(gate_up, out=product)
        self._down(product, out=out)
