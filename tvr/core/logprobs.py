"""Log-probabilities: computed on the device, carried to the host, and named for the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tvr.core.outputs import Logprob


class RawLogprobs(NamedTuple):
    """One position's, on the host and still to be named.

    Attributes:
        value: the log-probability of the token that is there.
        rank: of this token among all, from 1.
        ids: the bytes of int64 ids: the token that is there, then the likeliest, best first.
        values: the bytes of their fp32 log-probabilities.
    """

    value: float
    rank: int
    ids: bytes
    values: bytes

    def named(self, texts: Mapping[int, str] | None) -> dict[int, Logprob]:
        """Return them by token id, the token that is there first; `texts` are those of tokens."""
        ids = memoryview(self.ids).cast("q").tolist()
        values = memoryview(self.values).cast("f").tolist()
        ranks = (self.rank, *range(1, len(ids)))
        decoded = [None] * len(ids) if texts is None else map(texts.__getitem__, ids)
        # If the token that is there comes again it has the same value and rank.
        return dict(zip(ids, map(Logprob, values, ranks, decoded), strict=True))


class LogprobSeries:
    """Those of an answer's tokens, which are named when they are read.

    Args:
        texts: of tokens; None: there is no tokenizer.
    """

    __slots__ = ("_given", "_named", "_texts")

    def __init__(self, texts: Mapping[int, str] | None) -> None:
        self._texts = texts
        self._given: list[RawLogprobs] = []
        self._named: list[dict[int, Logprob]] = []

    def append(self, raw: RawLogprobs) -> None:
        """Add those of one more token."""
        self._given.append(raw)

    def named(self) -> list[dict[int, Logprob]]:
        """Return those of all tokens so far, by token id: one list, which grows."""
        done = len(self._named)
        new = [raw.named(self._texts) for raw in self._given[done:]]
        # To places, so that two threads that come here at once add nothing twice.
        self._named[done : done + len(new)] = new
        return self._named

    def __reduce__(self) -> tuple[type, tuple[object]]:
        """A copy is a plain list: it does not grow, and has no use for a tokenizer's texts."""
        return list, (self.named(),)


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

    def on_host(self, num_tops: Iterable[int]) -> list[RawLogprobs]:
        """Return each row, with as many of the likeliest as were asked for.

        The tensors have arrived on the host. What they are in is free then.
        """
        # Bytes of each row's own: nothing is kept for a row that other rows would be kept with, and
        # there are no objects that a garbage collection would have to look at.
        width = self.ids.shape[1]
        ids, values = self.ids.numpy().tobytes(), self.values.numpy().tobytes()
        id_bytes, value_bytes = self.ids.element_size(), self.values.element_size()
        columns = zip(self.values[:, 0].tolist(), self.ranks.tolist(), num_tops, strict=True)
        rows = []
        for row, (value, rank, num_top) in enumerate(columns):
            begin = row * width
            end = begin + min(1 + num_top, width)
            own_ids = ids[begin * id_bytes : end * id_bytes]
            own_values = values[begin * value_bytes : end * value_bytes]
            rows.append(RawLogprobs(value, rank, own_ids, own_values))
        return rows
