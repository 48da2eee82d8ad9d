"""Small copies from the host to the device that do not wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Index = Tensor | slice  # a slice is the whole batch, and costs no gather


def to_device(
    values: Sequence[int] | Sequence[tuple[int, ...]] | Tensor, device: torch.device
) -> Tensor:
    """Return a tensor on `device`; integers become int64."""
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        values = values.pin_memory()  # a copy from pageable memory would wait
    return values.to(device, non_blocking=True)


def to_index(places: list[int], total: int, device: torch.device) -> Index:
    """Return an index that takes `places`, in rising order, out of a batch of `total` rows."""
    return slice(None) if len(places) == total else to_device(places, device)
