"""Running one check on drawn cases, and shrinking the first that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
from hypothesis.errors import Flaky, Unsatisfiable

from tvr.conformance.case import Case

#: Shrinking ends after so long, with the smallest failure found till then.
SHRINK_SECONDS = 20.0

#: Where cases are turned down, more are drawn, up to so many times as many as were asked for.
_TURNS = 5
_NEXT_SEED = 1_000_003


@dataclass(frozen=True)
class Failure:
    """The smallest drawn case that fails, and how."""

    case: Case
    error: Exception


def find_failure(
    cases: hypothesis.strategies.SearchStrategy[Case],
    examine: Callable[[Case], None],
    *,
    fits: Callable[[Case], bool] = lambda case: True,
    seed: int,
    max_examples: int,
    may_shrink: Callable[[], bool] = lambda: True,
) -> Failure | None:
    """Return the smallest case found that fails, if any does.

    Args:
        cases: what to draw from.
        examine: raises an Exception if a case fails.
        fits: whether a case is to be examined; the others are turned down.
        seed: equal seeds draw equal cases.
        max_examples: most cases to examine beside the simplest of all, which hypothesis begins
            with whatever the seed; shrinking takes more.
        may_shrink: whether more cases can be examined after a failure.
    """
    search = _Search(examine, fits, may_shrink)
    for turn in range(_TURNS):
        wanted = max_examples - search.num_examined
        if wanted <= 0 or search.failures:
            break
        search.run(cases, seed=seed + turn * _NEXT_SEED, max_examples=wanted)
    if not search.failures:
        return None
    smallest = min(search.failures, key=lambda case: (case.size, len(case.text)))
    return Failure(smallest, search.failures[smallest])


class _Search:
    """What is known so far."""

    def __init__(
        self,
        examine: Callable[[Case], None],
        fits: Callable[[Case], bool],
        may_shrink: Callable[[], bool],
    ) -> None:
        self.failures: dict[Case, Exception] = {}
        self.num_examined = 0
        self._examine, self._fits, self._may_shrink = examine, fits, may_shrink
        self._right: set[Case] = set()  # or turned down
        self._first_failure = 0.0

    def run(
        self, cases: hypothesis.strategies.SearchStrategy[Case], *, seed: int, max_examples: int
    ) -> None:
        """Draw the simplest case and `max_examples` others, and shrink the first that fails."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max_examples + 1,
            database=None,
            deadline=None,
            print_blob=False,  # the case's own text reproduces it
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )
        @hypothesis.given(cases)
        def test(case: Case) -> None:
            self._meet(case)

        try:
            test()
        except Flaky:
            pass  # a failure came and went, and is kept
        except Unsatisfiable:
            pass  # nothing that can be drawn is a call
        except Exception as error:
            if error not in self.failures.values():
                raise

    def _meet(self, case: Case) -> None:
        if case in self.failures:  # shrinking comes back to what it knows: once is enough
            raise self.failures[case]
        if case in self._right or (self.failures and self._is_over()):
            return
        if not self._fits(case):
            self._right.add(case)
            return
        self.num_examined += 1
        try:
            self._examine(case)
        except Exception as error:
            self._first_failure = self._first_failure or time.monotonic()
            self.failures[case] = error
            raise
        self._right.add(case)

    def _is_over(self) -> bool:
        out_of_time = time.monotonic() - self._first_failure > SHRINK_SECONDS
        return out_of_time or not self._may_shrink()
