"""What a check is, and the book of what became of it.

A skip comes only from declared capability; a declared op with no executed check is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject
    from tvr.contract import OpSpec

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class CheckFailed(Exception):
    """A backend does not keep a claim; the message says what was found and what was wanted."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What became of one check on one case.

    Attributes:
        check: name of the check, without `check_`.
        op: op it was run for.
        case: name of the case.
        outcome: "passed", "failed" or "skipped".
        detail: why it failed or was skipped.
    """

    check: str
    op: str
    case: str
    outcome: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome == FAILED


def _always(_: Case) -> bool:
    return True


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
    """

    run: Callable[[Subject, Case], None]
    ops: Sequence[str]
    flag: str | None = None
    applies: Callable[[Case], bool] = _always
    also: Callable[[Case], OpSpec] | None = None
    of_declaration: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__.removeprefix("check_")

    @property
    def claim(self) -> str:
        """The first line of its docstring: the promise that is checked."""
        return (self.run.__doc__ or "").strip().splitlines()[0]
