"""Memory of inputs and outputs, kept from cell to cell: gigabytes are filled once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_SEED = 0


class Buffers:
    """Flat buffers by name, as large as any cell has needed so far.

    What was returned for a name before is overlaid, or outlives its buffer: a cell must be done
    with its tensors before the next one asks.

    Attributes:
        device: where they lie.
        generator: the source of all random numbers, seeded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(_SEED)
        self._flat: dict[str, Tensor] = {}

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of standard normal numbers, to be read only.

        Zeros would be quicker: they toggle no wires, and a GPU clocks by its power.
        """
        return self._take(name, shape, dtype, random=True)

    def unfilled(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor that holds anything."""
        return self._take(name, shape, dtype, random=False)

    def _take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, random: bool
    ) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.dtype != dtype or len(flat) < size:
            del flat
            self._flat.pop(name, None)  # two at a time might not fit
            flat = torch.empty(size, dtype=dtype, device=self.device)
            self._flat[name] = flat.normal_(generator=self.generator) if random else flat
        return flat[:size].view(shape)
