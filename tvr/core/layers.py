"""The parts of a decoder layer. Each binds its ops once and then only calls them.

T tokens, H query heads, KVH KV heads, D head_dim, I intermediate_size. Every output is allocated
by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec, RopeKvWriteSpec
from tvr.core.products import AddedLinear, GatedLinear, NormedLinear
from tvr.core.residual_stream import RMSNorm

if TYPE_CHECKING:
    from tvr.core.batch import ForwardBatch
    from tvr.core.buffers import Buffers
    from tvr.core.build_context import BuildContext
    from tvr.core.parameters import LayerWeights
    from tvr.core.residual_stream import ResidualStream


class DecoderLayer:
    """Attention, then MLP, each of a norm of the stream and added to the stream."""

    def __init__(self, ctx: BuildContext, weights: LayerWeights, cos_sin_cache: Tensor) -> None:
        """cos_sin_cache: [max_position, D] fp32."""
        attention, mlp = ctx.at("self_attn"), ctx.at("mlp")
        norm = RMSNorm(ctx.at("input_layernorm"), weights.input_norm)
        self._qkv = NormedLinear(attention.at("qkv_proj"), norm, weights.qkv)
        self._attention = Attention(attention, cos_sin_cache)
        self._o = AddedLinear(attention.at("o_proj"), weights.o)
        norm = RMSNorm(ctx.at("post_attention_layernorm"), weights.post_attention_norm)
        self._gate_up = GatedLinear(mlp, norm, weights.gate_up)
        self._down = AddedLinear(mlp.at("down_proj"), weights.down)

    def __call__(
        self, x: ResidualStream, batch: ForwardBatch, kv: tuple[Tensor, Tensor], scratch: Buffers
    ) -> None:
        """Advance x by one layer; kv: its caches."""
        # x = x + o(attention(qkv(norm(x))))
        self._qkv(x, out=scratch.qkv)
        self._attention(scratch.qkv, batch, kv, out=scratch.attended)
        self._o(scratch.attended, x)
        # x = x + down(silu(gate(norm(x))) * up(norm(x)))
        self._gate_up(x, gate_up=scratch.gate_up, out=scratch.product)
        self._down(scratch.product, x)

    def adds_at_once(self, num_tokens: int) -> bool:
        """Whether the stream of a step of so many tokens has no delta afterwards."""
        return self._down.adds_at_once(num_tokens)


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
