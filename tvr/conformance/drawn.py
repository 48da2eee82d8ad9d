"""Running one check on drawn cases."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from tvr.conformance import drawing, strategies
from tvr.conformance.case import UNNAMED, Case
from tvr.conformance.judging import judge, why_skipped
from tvr.conformance.ledger import PASSED, SKIPPED, Check, CheckFailed, CheckResult
from tvr.conformance.selection import Selection
from tvr.conformance.subject import Subject


def judge_drawn(
    backend: Subject,
    check: Check,
    op: str,
    selection: Selection,
    *,
    named: Sequence[Case],
    on_begin: Callable[[str], None],
) -> CheckResult:
    """Run a check on drawn cases; if one fails, the result is that of the smallest that does.

    Args:
        named: the named cases that the check was run on, or skipped.
        on_begin: called with the text of each case before it is run.
    """
    result = CheckResult(
        check=check.name, op=op, case=UNNAMED, outcome=SKIPPED, seed=selection.seed
    )
    if reason := _why_never(backend, check, op, named):
        return replace(result, detail=reason)
    began = time.perf_counter()
    seen: list[CheckResult] = []

    def fits(case: Case) -> bool:
        return check.applies(case) and not why_skipped(backend, check, case)

    def examine(case: Case) -> None:
        on_begin(case.handle)
        seen.append(judge(backend, check, case, selection.seed))
        if seen[-1].failed:
            raise CheckFailed(seen[-1].detail)

    if check.of_declaration:
        cases = strategies.any_cases(op, selection.level)
    else:
        cases = strategies.cases(op, backend.info, backend.device, selection.level)
    failure = drawing.find_failure(
        cases,
        examine,
        fits=fits,
        seed=zlib.crc32(f"{op} {check.name} {selection.seed}".encode()),
        max_examples=selection.examples,
        may_shrink=backend.answers,
    )
    seconds = time.perf_counter() - began
    if failure is not None:
        (smallest, *_) = (r for r in seen if r.case == failure.case.handle)
        return replace(smallest, seconds=seconds)
    if not seen:
        detail = "no case can be drawn that is declared and has what the check needs"
        return replace(result, detail=detail, seconds=seconds)
    nearest = max(seen, key=lambda r: r.share)
    return replace(
        result,
        outcome=PASSED,
        detail=f"{len(seen)} cases",
        error=nearest.error,
        limit=nearest.limit,
        seconds=seconds,
    )


def _why_never(backend: Subject, check: Check, op: str, named: Sequence[Case]) -> str:
    """Return why no drawn case could be run either; "": one may.

    Drawn cases would be turned down one by one for the same reason, which takes far longer. A box
    that holds no named case is known by its drawn ones alone.
    """
    if check.of_declaration:
        return ""
    if op not in backend.info.ops:
        return f"does not implement {op}"
    reasons: list[list[str]] = []
    for box in strategies.boxes_on(backend.device, backend.info, op):
        inside = [case for case in named if not box.why_not(case.spec, backend.device)]
        reasons = [why_skipped(backend, check, case) for case in inside]
        if not reasons or not all(reasons):
            return ""
    return "; ".join(reasons[0]) if reasons else f"{op} is not declared for {backend.device}"
