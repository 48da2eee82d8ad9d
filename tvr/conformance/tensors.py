"""Dtypes by the contract's names, and tensors that no op has filled yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(x: Tensor) -> str:
    """Return the contract's name of x's dtype."""
    return str(x.dtype).removeprefix("torch.")


def unfilled(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of NaN: an element left unwritten shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
