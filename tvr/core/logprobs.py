"""Log-probabilities: computed on the device, carried to the host, and named for the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from tvr.core.outputs import Logprob

#: Half the time of `Logprob(...)`, and needed for some tokens of every token there is.
_new_logprob = partial(tuple.__new__, Logprob)


class RawLogprobs(NamedTuple):
    """One position's, on the host.

    Attributes:
        ids: the token that is there, then the likeliest tokens, best first.
        values: their log-probabilities.
        rank: of the first of them among all tokens, from 1.
    """

    ids: list[int]
    values: list[float]
    rank: int

    def cut(self, num_top: int) -> RawLogprobs:
        """Return as many of the likeliest as were asked for."""
        width = num_top + 1
        if width >= len(self.ids):
            return self
        return RawLogprobs(self.ids[:width], self.values[:width], self.rank)

    def named(self, texts: Mapping[int, str] | None) -> dict[int, Logprob]:
        """Return them by token id, the token that is there first; `texts` are those of tokens."""
        ids, values, rank = self
        # If the token that is there comes again it has the same value and rank.
        ranks = (rank, *range(1, len(ids)))
        decoded: Iterable[str | None] = repeat(None)
        if texts is not None:
            decoded = map(texts.__getitem__, ids)
        rows = zip(values, ranks, decoded, strict=False)  # of which the last may be endless
        return dict(zip(ids, map(_new_logprob, rows), strict=True))


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of r positions, in one piece of memory, which one copy takes to the host.

    Attributes:
        ids: [r, 1 + k] int64, the token that is there, then the k likeliest.
        values: [r, 1 + k] fp32, at least `LOGPROB_FLOOR`.
        ranks: [r] int64, of the token that is there.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    _memory: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_top: int, device: torch.device) -> LogprobTensors:
        """Return room for `num_rows` positions and the `num_top` likeliest tokens of each."""
        num = num_rows * (1 + num_top)
        return cls._within(
            torch.empty(num + num_rows + (num + 1) // 2, dtype=torch.int64, device=device),
            num_rows,
            num_top,
        )

    @classmethod
    def _within(cls, memory: Tensor, num_rows: int, num_top: int) -> LogprobTensors:
        num = num_rows * (1 + num_top)
        values = memory[num + num_rows :].view(torch.float32)[:num]
        return cls(
            ids=memory[:num].view(num_rows, 1 + num_top),
            values=values.view(num_rows, 1 + num_top),
            ranks=memory[num : num + num_rows],
            _memory=memory,
        )

    def to_pinned(self) -> LogprobTensors:
        """Start copying them to the host, on the current stream."""
        on_host = torch.empty(len(self._memory), dtype=torch.int64, pin_memory=True)
        on_host.copy_(self._memory, non_blocking=True)
        num_rows, width = self.ids.shape
        return self._within(on_host, num_rows, width - 1)

    def rows(self) -> Sequence[RawLogprobs]:
        """Return each row, of tensors that have arrived on the host."""
        columns = (self.ids.tolist(), self.values.tolist(), self.ranks.tolist())
        return list(map(RawLogprobs, *columns))
