"""A workspace as core gives it to an op, between two bands that show whether it is kept to."""

from __future__ import annotations

import torch

from tvr.conformance.ledger import CheckFailed

_ALIGNMENT = 256
_BAND = 4096  # bytes on either side, a multiple of twice the alignment
_SENTINEL = 0xA5


class Workspace:
    """`num_bytes` zeros at a multiple of 256 bytes, and of no more. They are never cleared again.

    Attributes:
        inside: [num_bytes] uint8, what the op is given.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        size = _BAND + num_bytes + _BAND + 2 * _ALIGNMENT
        buffer = torch.full((size,), _SENTINEL, dtype=torch.uint8, device=device)
        # Allocators align to more than is promised, and an op must not count on that.
        start = _BAND + (_ALIGNMENT - buffer.data_ptr()) % (2 * _ALIGNMENT)
        self.inside = buffer[start : start + num_bytes].zero_()
        self._before, self._behind = buffer[:start], buffer[start + num_bytes :]

    def require_intact_bands(self) -> None:
        """Raise `CheckFailed` if a byte on either side was written."""
        for where, band in (("before", self._before.flip(0)), ("behind", self._behind)):
            written = (band != _SENTINEL).nonzero().flatten().tolist()
            if written:
                raise CheckFailed(
                    f"wrote {len(written)} bytes {where} its workspace of {len(self.inside)} "
                    f"bytes, the nearest {written[0]} bytes away from it"
                )
