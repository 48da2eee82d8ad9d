"""The paged pool of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tvr.core.config import DTYPE_BYTES, ModelConfig
from tvr.errors import CapacityError


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """Every layer's pool.

    Attributes:
        layers: (k_cache, v_cache) of each layer, both
            [num_blocks, num_kv_heads, block_size, head_dim].
    """

    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: str,
        device: torch.device | str,
    ) -> KVCache:
        """Allocate zeroed pools of `num_blocks` blocks in every layer.

        Raises:
            CapacityError: the device has not that much memory.
        """
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        torch_dtype = getattr(torch, dtype)

        def pool() -> Tensor:
            if torch.device(device).type == "cpu":
                # The system hands out zero pages when they are first written. torch.zeros writes
                # them all: seconds for a pool of which a short prompt uses a thousandth.
                size = math.prod(shape) * DTYPE_BYTES[dtype]
                return torch.from_numpy(np.zeros(size, np.uint8)).view(torch_dtype).view(shape)
            return torch.zeros(shape, dtype=torch_dtype, device=device)

        try:
            return cls(layers=[(pool(), pool()) for _ in range(config.num_layers)])
        # A CUDA OutOfMemoryError is a RuntimeError; numpy raises a ValueError past its index range.
        except (RuntimeError, MemoryError, ValueError) as e:
            total = num_blocks * config.kv_bytes_per_block(block_size, dtype)
            raise CapacityError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens takes "
                f"{total / 2**20:.0f} MiB, which {device} does not have; lower num_blocks or "
                f"memory_fraction ({e})"
            ) from e
