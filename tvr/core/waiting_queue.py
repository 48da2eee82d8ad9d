"""The line of sequences that wait for a row and for blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from tvr.core.sequence import Sequence


class WaitingQueue:
    """First come, first served, with a bounded number of exceptions.

    While the first one does not fit, smaller ones behind it may go ahead, at most `max_bypass` of
    them: small requests need not wait for a big one's blocks, and it is not passed over for ever.

    Children (n > 1) stand beside the line until their parent's prompt is computed.
    """

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        self._line: OrderedDict[str, Sequence] = OrderedDict()
        self._children: dict[str, dict[str, Sequence]] = {}  # by parent, then by their own id

    def __len__(self) -> int:
        return len(self._line) + sum(map(len, self._children.values()))

    def append(self, seq: Sequence) -> None:
        """Put a sequence at the end of the line."""
        self._line[seq.request_id] = seq

    def push_front(self, seq: Sequence) -> None:
        """Put a sequence that has had its turn before at the front."""
        self._line[seq.request_id] = seq
        self._line.move_to_end(seq.request_id, last=False)

    def append_child(self, parent_id: str, seq: Sequence) -> None:
        """Let a sequence wait until `release_children(parent_id)`."""
        self._children.setdefault(parent_id, {})[seq.request_id] = seq

    def release_children(self, parent_id: str) -> None:
        """Put the children of a sequence at the front of the line, in their order."""
        for seq in reversed(self._children.pop(parent_id, {}).values()):
            self.push_front(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands; no-op if it does not wait."""
        if self._line.pop(seq.request_id, None) is None and seq.parent_id is not None:
            siblings = self._children.get(seq.parent_id, {})
            siblings.pop(seq.request_id, None)
            if not siblings:
                self._children.pop(seq.parent_id, None)

    def candidates(self) -> Iterator[Sequence]:
        """Yield those to try, first come first served.

        Whoever fits must be `remove`d before the next one is asked for. The first that stays is
        followed by those that may still overtake it, and then by nobody.
        """
        while self._line:
            first = next(iter(self._line.values()))
            yield first
            if first.request_id in self._line:
                num = self._max_bypass - first.num_bypassed
                yield from list(islice(self._line.values(), 1, 1 + num))
                return
