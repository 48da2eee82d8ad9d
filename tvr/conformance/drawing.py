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


@dataclass(frozen=True)
class Failure:
    """The smallest drawn case that fails, and how."""

    case: Case
    error: Exception


def find_failure(
    strategy: hypothesis.strategies.SearchStrategy[Case],
    examine: Callable[[Case], None],
    *,
    seed: int,
    max_examples: int,
) -> tuple[int, Failure | None]:
    """Return how many cases were examined, and the smallest of them that fails, if any.

    Args:
        strategy: draws the cases.
        examine: raises an Exception if a case fails.
        seed: equal seeds draw equal cases.
        max_examples: most cases to draw; shrinking takes more.
    """
    failures: dict[Case, Exception] = {}
    seen: set[Case] = set()
    began = 0.0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max_examples,
        database=None,
        deadline=None,
        print_blob=False,  # the case's own text reproduces it
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @hypothesis.given(strategy)
    def test(case: Case) -> None:
        nonlocal began
        if case in failures:  # shrinking comes back to what it knows: once examined is enough
            raise failures[case]
        if failures and time.monotonic() - began > SHRINK_SECONDS:
            return
        seen.add(case)
        try:
            examine(case)
        except Exception as error:
            began = began or time.monotonic()
            failures[case] = error
            raise

    try:
        test()
    except (Unsatisfiable, Flaky):
        pass  # no case can be drawn, so none was seen; or a failure came and went, and is kept
    except Exception as error:
        if error not in failures.values():
            raise
    if not failures:
        return len(seen), None
    smallest = min(failures, key=lambda case: (case.size, len(case.text)))
    return len(seen), Failure(smallest, failures[smallest])
