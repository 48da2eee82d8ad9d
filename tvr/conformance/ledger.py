"""What a check is, and the book of what became of it.

A skip comes only from declared capability; a declared op with no executed check is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvr.conformance.margin import share

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject
    from tvr.contract import OpSpec

PASSED, FAILED, SKIPPED, EXPECTED = OUTCOMES = ("passed", "failed", "skipped", "expected")


class CheckFailed(Exception):
    """A backend does not keep a claim; the message says what was found and what was wanted."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What became of one check on one case.

    Attributes:
        check: name of the check, without `check_`.
        op: op it was run for.
        case: name of the case; of a drawn one its text, or "drawn" for several that passed.
        outcome: "passed", "failed", "skipped", or "expected": a failure known beforehand.
        detail: why it failed or was skipped.
        error, limit: the comparison that came nearest to its limit, or went furthest over it, in
            its own unit; None: nothing was compared.
        seconds: how long it took.
        seed: the seed that the run was given.
        text: the case written out; "" for several.
    """

    check: str
    op: str
    case: str
    outcome: str
    detail: str = ""
    error: float | None = None
    limit: float | None = None
    seconds: float = 0.0
    seed: int = 0
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome == FAILED

    @property
    def share(self) -> float:
        """The error as a share of its limit; -1 if nothing was compared."""
        if self.error is None or self.limit is None:
            return -1.0
        return share(self.error, self.limit)


def _always(_: Case) -> bool:
    return True


def _nothing(backend: Subject, case: Case) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check function and where it applies.

    Attributes:
        run: `check_<claim>(backend, case)`; raises `CheckFailed`, returns nothing.
        ops: ops it judges.
        flag: declared flag without which it is skipped ("deterministic", ...).
        applies: whether a case has what the check needs (an lse, several blocks, ...).
        also: a second spec that the check runs; it is skipped where that is not declared.
        of_declaration: judges the declaration itself, so undeclared specs are its business too.
        needs: why the check cannot be run: a device that is missing, or a part that the backend
            does not bind; empty: it can.
    """

    run: Callable[[Subject, Case], None]
    ops: Sequence[str]
    flag: str | None = None
    applies: Callable[[Case], bool] = _always
    also: Callable[[Case], OpSpec] | None = None
    of_declaration: bool = False
    needs: Callable[[Subject, Case], list[str]] = _nothing

    @property
    def name(self) -> str:
        return self.run.__name__.removeprefix("check_")

    @property
    def claim(self) -> str:
        """The first line of its docstring: the promise that is checked."""
        return (self.run.__doc__ or "").strip().splitlines()[0]
