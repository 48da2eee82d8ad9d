"""The weights of a model, and where each tensor of a checkpoint goes in them.

q, k and v live in one matrix, gate and up in another, so that each is one product. A checkpoint's
tensors are copied straight into their rows of those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tvr.core.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearWeights:
    """weight [out, in] and bias [out] or None of one product."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. H query heads, KVH KV heads, D head_dim, I intermediate_size.

    Attributes:
        input_norm, post_attention_norm: [hidden].
        qkv: [(H + 2 * KVH) * D, hidden], rows of q, then k, then v.
        o: [hidden, H * D].
        gate_up: [2 * I, hidden], rows of gate, then up.
        down: [hidden, I].
    """

    input_norm: Tensor
    qkv: LinearWeights
    o: LinearWeights
    post_attention_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """All weights of a model, on one device and of one dtype.

    Attributes:
        embedding: [vocab, hidden].
        layers: decoder layers, first to last.
        norm: [hidden], of the final norm.
        lm_head: [vocab, hidden]; the very embedding tensor where tied.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, dtype: str, device: torch.device | str) -> Weights:
        """Allocate uninitialised weights; on device "meta" this takes no memory."""

        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

        def linear(out_features: int, in_features: int, bias: bool) -> LinearWeights:
            return LinearWeights(
                weight=tensor(out_features, in_features),
                bias=tensor(out_features) if bias else None,
            )

        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
        embedding = tensor(config.vocab_size, hidden)
        layers = [
            LayerWeights(
                input_norm=tensor(hidden),
                qkv=linear(qkv_size, hidden, config.attention_bias),
                o=linear(hidden, q_size, config.attention_bias),
                post_attention_norm=tensor(hidden),
                gate_up=linear(2 * config.intermediate_size, hidden, config.mlp_bias),
                down=linear(hidden, config.intermediate_size, config.mlp_bias),
            )
            for _ in range(config.num_layers)
        ]
        return cls(
            embedding=embedding,
            layers=layers,
            norm=tensor(hidden),
            lm_head=embedding if config.tie_word_embeddings else tensor(config.vocab_size, hidden),
        )

    def slots(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield each checkpoint tensor's name with the (slice of a) weight it fills."""
        kv_size = config.num_kv_heads * config.head_dim
        qkv_sizes = [config.num_heads * config.head_dim, kv_size, kv_size]
        gate_up_sizes = [config.intermediate_size] * 2
        yield "model.embed_tokens.weight", self.embedding
        for idx, layer in enumerate(self.layers):
            prefix = f"model.layers.{idx}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            yield f"{prefix}input_layernorm.weight", layer.input_norm
            yield from _split(layer.qkv, qkv_sizes, [f"{attention}{x}_proj" for x in "qkv"])
            yield from _split(layer.o, [config.hidden_size], [f"{attention}o_proj"])
            yield f"{prefix}post_attention_layernorm.weight", layer.post_attention_norm
            yield from _split(layer.gate_up, gate_up_sizes, [f"{mlp}gate_proj", f"{mlp}up_proj"])
            yield from _split(layer.down, [config.hidden_size], [f"{mlp}down_proj"])
        yield "model.norm.weight", self.norm
        if not config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head


def _split(
    linear: LinearWeights, sizes: list[int], names: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the row slices of a fused product under the names of its parts."""
    for name, rows in zip(names, torch.split(linear.weight, sizes), strict=True):
        yield f"{name}.weight", rows
    if linear.bias is not None:
        for name, rows in zip(names, torch.split(linear.bias, sizes), strict=True):
            yield f"{name}.bias", rows
