"""The line of sequences that wait for a row and for blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from tvr.core.sequence import Sequence

_arrival = attrgetter("arrival")
_rank = attrgetter("rank", "arrival")


class WaitingQueue:
    """A line in the order of arrival, served in the order of ranks as far as that is fair.

    At most `max_bypass` sequences may be taken past the first in line, whether they rank before
    it or it does not fit and they do. Then it is the next one. Everybody comes to be the first in
    line, so nobody is passed over for ever.

    Children (n > 1) stand beside the line until their parent's prompt is computed.

    Attributes:
        unranked: those in line without a rank, by request id.
    """

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        self._line: list[Sequence] = []  # by arrival
        self._ranked: list[Sequence] = []  # by rank, then arrival
        self.unranked: dict[str, Sequence] = {}
        self._children: dict[str, dict[str, Sequence]] = {}  # by parent, then by their own id

    def __len__(self) -> int:
        return len(self._line) + sum(map(len, self._children.values()))

    def append(self, seq: Sequence) -> None:
        """Put a sequence where it stands by its arrival: at the end, unless it ran before."""
        insort(self._line, seq, key=_arrival)
        seq.rank = ()
        self.unranked[seq.request_id] = seq

    def append_child(self, parent_id: str, seq: Sequence) -> None:
        """Let a sequence wait until `release_children(parent_id)`."""
        self._children.setdefault(parent_id, {})[seq.request_id] = seq

    def release_children(self, parent_id: str) -> None:
        """Put the children of a sequence in line."""
        for seq in self._children.pop(parent_id, {}).values():
            self.append(seq)

    def rank(self, ranks: list[tuple[float, ...]]) -> None:
        """Give all of `unranked` their ranks, in that order."""
        for seq, rank in zip(self.unranked.values(), ranks, strict=True):
            seq.rank = rank
            insort(self._ranked, seq, key=_rank)
        self.unranked.clear()

    def unrank(self) -> None:
        """Take everybody's rank away."""
        self._ranked.clear()
        self.unranked = {seq.request_id: seq for seq in self._line}

    def take(self, seq: Sequence) -> None:
        """Remove a sequence that has got its turn, and note whom it passed."""
        if seq is not self._line[0]:
            self._line[0].num_bypassed += 1
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands; it must be waiting."""
        if _discard(self._line, seq, _arrival):
            if self.unranked.pop(seq.request_id, None) is None:
                _discard(self._ranked, seq, _rank)
        elif seq.parent_id is not None:
            siblings = self._children[seq.parent_id]
            del siblings[seq.request_id]
            if not siblings:
                del self._children[seq.parent_id]

    def candidates(self) -> Iterator[Sequence]:
        """Yield those to try, best rank first; who is past its last bypass goes before all.

        Whoever fits must be `take`n before the next one is asked for. Once one has stayed, only
        as many more are looked at as may still pass the first: a long line costs no more.
        """
        num_failed = 0
        num_left = None
        while self._line and num_left != 0:
            first = self._line[0]
            allowance = self._max_bypass - first.num_bypassed
            if allowance <= 0:
                seq = first
            elif num_failed < len(self._ranked):
                seq = self._ranked[num_failed]
            else:
                return
            num_left = None if num_left is None else num_left - 1
            yield seq
            if seq.row < 0:
                if allowance <= 0:
                    return
                num_failed += 1
                num_left = allowance if num_left is None else num_left


def _discard(line: list[Sequence], seq: Sequence, key: Callable[[Sequence], Any]) -> bool:
    """Remove `seq` from a sorted line; return False if it is not there."""
    index = bisect_left(line, key(seq), key=key)
    if index == len(line) or line[index] is not seq:
        return False
    del line[index]
    return True
