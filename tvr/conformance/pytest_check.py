"""A check of one op as a pytest test: it passes, fails, is skipped or fails as expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvr.conformance.expected import Expected, apply_expected
from tvr.conformance.ledger import EXPECTED, SKIPPED, CheckResult
from tvr.conformance.registry import CHECKS
from tvr.conformance.report import format_failure, smallest_failure
from tvr.conformance.selection import Selection
from tvr.conformance.suite import IS_CHECKED, Unit, units
from tvr.errors import TvrError

#: Reasons that the message of a skipped test names; each dtype may have one of its own.
NAMED_REASONS = 3


class Runner(NamedTuple):
    """A backend that is loaded, in this process or in another.

    Attributes:
        name: of the backend.
        declared: ops it declares.
        run: runs one check of one op on its cases.
    """

    name: str
    declared: Sequence[str]
    run: Callable[[Unit], Iterator[CheckResult]]


class Conformance:
    """What the tests of one backend share: it is loaded once, and each unit is run once.

    Args:
        load: loads the backend; may raise a TvrError.
        selection: what of the suite is run.
        expected: failures known beforehand.
        reproduce: returns the line that runs a failed case again; called with the result and the
            name of the backend.
    """

    def __init__(
        self,
        load: Callable[[], Runner],
        selection: Selection,
        expected: Sequence[Expected],
        reproduce: Callable[..., str],
    ) -> None:
        self.selection = selection
        self.units = units(selection)
        self._load = load
        self._expected = expected
        self._reproduce = reproduce
        self._runner: Runner | TvrError | None = None
        self._results: dict[Unit, list[CheckResult]] = {}

    def load(self) -> Runner:
        """Return the backend, loaded the first time; what was wrong then is raised every time."""
        if self._runner is None:
            try:
                self._runner = self._load()
            except TvrError as e:
                self._runner = e
        if isinstance(self._runner, TvrError):
            raise self._runner
        return self._runner

    def results(self, unit: Unit) -> list[CheckResult]:
        """Return what became of `unit` on each of its cases."""
        if unit not in self._results:
            found = list(self.load().run(unit))
            self._results[unit] = apply_expected(found, self._expected)
        return self._results[unit]

    def test(self, unit: Unit) -> None:
        """End the running test as the results of `unit` say."""
        import pytest  # an extra: `check_backend`, in the same package, does without it

        results = self.results(unit)
        if any(r.failed for r in results):
            line = self._reproduce(smallest_failure(results), backend=self.load().name)
            pytest.fail(format_failure(results, line), pytrace=False)
        if known := [r for r in results if r.outcome == EXPECTED]:
            pytest.xfail(_reasons(known))
        if all(r.outcome == SKIPPED for r in results):
            pytest.skip(_reasons(results))

    def test_is_checked(self, unit: Unit) -> None:
        """Fail the running test if its op is declared but none of the checks is run on any case.

        It asks for results until it has one, so it needs no other test to have been run before.
        """
        import pytest

        op = unit.op
        if op not in self.load().declared:
            pytest.skip(f"does not implement {op}")
        of_declaration = {check.name for check in CHECKS if check.of_declaration}
        judges = [u for u in self.units if u.op == op and u.check not in of_declaration]
        for judge in judges:
            if any(r.outcome != SKIPPED for r in self.results(judge)):
                return
        level = self.selection.level
        pytest.fail(
            f"{op} is declared, but no check was run on a case at level {level!r}", pytrace=False
        )


@dataclass(frozen=True)
class ConformanceCheck:
    """The test of one unit: call it."""

    conformance: Conformance
    unit: Unit

    def __call__(self) -> None:
        import pytest

        is_checked = self.unit.check == IS_CHECKED
        test = self.conformance.test_is_checked if is_checked else self.conformance.test
        try:
            test(self.unit)
            return
        except TvrError as e:  # the backend or an option cannot be used
            refusal = f"tvr: {e}"
        pytest.fail(refusal, pytrace=False)


def _reasons(results: Sequence[CheckResult]) -> str:
    """Return the first few reasons as one line."""
    reasons = list(dict.fromkeys(r.detail for r in results))
    more = len(reasons) - NAMED_REASONS
    shown = "; ".join(reasons[:NAMED_REASONS]) or "the check applies to no case of this level"
    return f"{shown}; and {more} more" if more > 0 else shown
