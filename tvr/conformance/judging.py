"""Running one check on one case."""

from __future__ import annotations

import time
from dataclasses import replace

from tvr.conformance.case import Case
from tvr.conformance.ledger import FAILED, PASSED, SKIPPED, Check, CheckFailed, CheckResult
from tvr.conformance.margin import measuring
from tvr.conformance.subject import Subject
from tvr.contract import declared_flags


def judge(backend: Subject, check: Check, case: Case, seed: int) -> CheckResult:
    """Return what becomes of `check` on `case`; `seed` is the one the run was given."""
    result = CheckResult(
        check=check.name,
        op=case.op,
        case=case.handle,
        outcome=PASSED,
        seed=seed,
        text=case.text,
    )
    if reasons := why_skipped(backend, check, case):
        return replace(result, outcome=SKIPPED, detail="; ".join(reasons))
    began = time.perf_counter()
    failure = None
    with measuring() as margin:
        try:
            check.run(backend, case)
        except (Exception, SystemExit) as error:  # what a backend raises is its failure alone
            failure = error
    result = replace(
        result, error=margin.error, limit=margin.limit, seconds=time.perf_counter() - began
    )
    return result if failure is None else replace(result, outcome=FAILED, detail=_says(failure))


def why_skipped(backend: Subject, check: Check, case: Case) -> list[str]:
    """Return why a check is not run on a case: what is not declared, or a missing device."""
    if check.of_declaration:
        return []
    reasons = backend.why_not(case.spec)
    if not reasons and check.also is not None:
        reasons = backend.why_not(check.also(case))
    flags = declared_flags(backend.info, case.spec, backend.device)
    if not reasons and check.flag is not None and check.flag not in flags:
        return [f"is not declared {check.flag}"]
    return reasons or check.needs(backend, case)


def _says(error: BaseException) -> str:
    return (
        str(error) if isinstance(error, CheckFailed) else f"raised {type(error).__name__}: {error}"
    )
