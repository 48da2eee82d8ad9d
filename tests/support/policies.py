"""Scheduling policies that no one should use."""

from __future__ import annotations

import random
from collections.abc import Callable

from tvr.core import FirstComeFirstServed, Sequence


class RandomPolicy:
    """Answers at random; with `trouble` as the share of answers that are none.

    Attributes:
        num_troubles: how many of these it gave.
    """

    def __init__(self, seed: int, trouble: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._trouble = trouble
        self.num_troubles = 0

    def admission_rank(self, seq: Sequence) -> object:
        return self._answer(self._rank)

    def preemption_rank(self, seq: Sequence) -> object:
        return self._answer(self._rank)

    def prefill_budget(self, num_tokens: int, num_decodes: int) -> object:
        assert num_tokens >= 1
        return self._answer(lambda: self._random.randrange(num_tokens + 3))

    def _rank(self) -> object:
        number = self._random.choice([0, 1, -2, 0.5, float("inf")])
        return self._random.choice([number, (number,), (number, number), ()])

    def _answer(self, right: Callable[[], object]) -> object:
        if self._random.random() >= self._trouble:
            return right()
        self.num_troubles += 1
        wrong = self._random.choice([None, "1", float("nan"), (1, "1"), [1], ValueError])
        if wrong is ValueError:
            raise ValueError("no idea")
        return wrong


class Contrary(FirstComeFirstServed):
    """Wants the newest admitted first, the oldest preempted, and no prefill at all."""

    def admission_rank(self, seq: Sequence) -> float:
        return -seq.arrival

    def preemption_rank(self, seq: Sequence) -> float:
        return seq.arrival

    def prefill_budget(self, num_tokens: int, num_decodes: int) -> int:
        return 0
