"""What a tiny model computes, in fp64 on the CPU: no cache, no blocks, no batch, no backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle
from tvr.contract import AttentionPrefillSpec
from tvr.core.rope import build_cos_sin_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tvr.core.config import ModelConfig
    from tvr.core.parameters import LinearWeights, Weights


def exact_logits(config: ModelConfig, weights: Weights, token_ids: Sequence[int]) -> Tensor:
    """Return the logits [n, vocab] fp64 behind each of n tokens; `weights` are on the CPU."""
    n, eps = len(token_ids), config.rms_norm_eps
    positions = torch.arange(n)
    angles = build_cos_sin_cache(config, n)
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    spec = AttentionPrefillSpec(
        dtype="float32",
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=1,
    )
    stream = weights.embedding[list(token_ids)].double()
    for layer in weights.layers:
        x = _norm(stream, layer.input_norm, eps)
        qkv = _product(x, layer.qkv).view(n, sum(heads), config.head_dim)
        q, k, v = torch.split(qkv, heads, dim=1)
        q, k = (oracle.rope(x, positions, angles)[0] for x in (q, k))
        attended = oracle.attention(spec, config.head_dim**-0.5, q, k, v).out
        stream = stream + _product(attended.flatten(1), layer.o)
        gate_up = _product(_norm(stream, layer.post_attention_norm, eps), layer.gate_up)
        stream = stream + _product(oracle.silu_mul(gate_up), layer.down)
    return oracle.linear(_norm(stream, weights.norm, eps), weights.lm_head, None)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return oracle.rms_norm(x, weight, eps, "once")  # x is fp64, so nothing is rounded


def _product(x: Tensor, weights: LinearWeights) -> Tensor:
    return oracle.linear(x, weights.weight, weights.bias)
