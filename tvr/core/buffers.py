"""The activations of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tvr.core.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """Every layer's activations; one layer after the other uses the same memory.

    As large as the largest step so far, the start-up profile's on CUDA; a step of T tokens uses
    the first T rows. H query heads, KVH KV heads, D head_dim, I intermediate_size.

    Attributes:
        residual: [T, hidden], the stream that layers add to.
        delta: [T, hidden], what is to be added to it next.
        normed: [T, hidden].
        qkv: [T, (H + 2 * KVH) * D].
        attended: [T, H * D].
        gate_up: [T, 2 * I].
        product: [T, I].
    """

    residual: Tensor
    delta: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    product: Tensor

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        """Allocate buffers, uninitialised, for steps of up to `num_tokens`."""

        def rows(width: int) -> Tensor:
            return torch.empty(num_tokens, width, dtype=dtype, device=device)

        q_size = config.num_heads * config.head_dim
        return cls(
            residual=rows(config.hidden_size),
            delta=rows(config.hidden_size),
            normed=rows(config.hidden_size),
            qkv=rows(q_size + 2 * config.num_kv_heads * config.head_dim),
            attended=rows(q_size),
            gate_up=rows(2 * config.intermediate_size),
            product=rows(config.intermediate_size),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens there is room for."""
        return self.residual.shape[0]

    def first(self, num_tokens: int) -> Buffers:
        """Return views of the first `num_tokens` rows."""
        names = [f.name for f in fields(self)]
        return Buffers(**{name: getattr(self, name)[:num_tokens] for name in names})
