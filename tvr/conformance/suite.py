"""Running the suite, unit by unit: one check of one op, on its named cases and on drawn ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tvr.conformance.case import Case, parse_case
from tvr.conformance.cases import cases
from tvr.conformance.ledger import FAILED, PASSED, SKIPPED, Check, CheckFailed, CheckResult
from tvr.conformance.margin import measuring
from tvr.conformance.registry import CHECKS, SUBJECTS
from tvr.conformance.selection import Selection, refuse_unknown
from tvr.conformance.subject import Subject, device_facts
from tvr.contract import BackendInfo, declared_flags
from tvr.errors import ConfigError

#: `CheckResult.case` of drawn cases that passed.
DRAWN = "drawn"
#: Check of a failure that is none of a check's: a declared op with nothing run.
IS_CHECKED = "declared_op_is_checked"

OnBegin = Callable[[str], None]


class Unit(NamedTuple):
    """One check of one op."""

    op: str
    check: str


def units(selection: Selection) -> list[Unit]:
    """Return what `selection` names, op by op.

    Raises:
        ConfigError: an unknown op or check, or nothing to check.
    """
    refuse_unknown("op", selection.ops or (), SUBJECTS)
    refuse_unknown("check", selection.checks or (), [check.name for check in CHECKS])
    found = [
        Unit(op, check.name)
        for op in dict.fromkeys(SUBJECTS if selection.ops is None else selection.ops)
        for check in CHECKS
        if op in check.ops and (selection.checks is None or check.name in selection.checks)
    ]
    if not found:
        raise ConfigError("conformance: none of the checks asked for judges any op asked for")
    return found


def run_unit(
    backend: Subject,
    unit: Unit,
    selection: Selection,
    *,
    skip: int = 0,
    on_begin: OnBegin = lambda handle: None,
) -> Iterator[CheckResult]:
    """Run one check on its cases and yield what became of each.

    Args:
        skip: leave out so many results at the start: they are known.
        on_begin: called with the handle of a case before it is run.

    Raises:
        ConfigError: a case that was asked for does not exist, or hypothesis is missing.
    """
    (check,) = (check for check in CHECKS if check.name == unit.check)
    for case in [case for case in _chosen(unit.op, selection) if check.applies(case)][skip:]:
        on_begin(case.handle)
        yield _judge(backend, check, case, selection.seed)
    named = sum(check.applies(case) for case in _chosen(unit.op, selection))
    if selection.examples and skip <= named:
        yield _draw(backend, check, unit.op, selection, on_begin)


def missing_checks(
    info: BackendInfo, results: Iterable[CheckResult], selection: Selection
) -> list[CheckResult]:
    """Return a failure for each op that is declared, selected and never run on any case."""
    of_declaration = {check.name for check in CHECKS if check.of_declaration}
    ran = {r.op for r in results if r.outcome != SKIPPED and r.check not in of_declaration}
    if selection.checks is not None or selection.cases is not None:
        return []
    return [
        CheckResult(
            check=IS_CHECKED,
            op=op,
            case="",
            outcome=FAILED,
            detail=f"{op} is declared, but no check was run on a case at level {selection.level!r}",
            seed=selection.seed,
        )
        for op in (SUBJECTS if selection.ops is None else selection.ops)
        if op in info.ops and op not in ran
    ]


def check_backend(
    obj: object,
    *,
    ops: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    level: str = "smoke",
    device: str = "cpu",
    seed: int = 0,
    max_examples: int | None = None,
    on_result: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Run every check that applies to a backend, in this process; return what became of each.

    Args:
        obj: the plugin object: a module, an instance or a class with hooks, as tvr loads it.
        ops: ops to check, or "engine": a model made of them; None: all.
        checks: names of the checks to run; None: all that judge these ops.
        cases: names or texts of cases of one op; None: those of the level, and drawn ones.
        level: "smoke", "quick" or "full"; each runs the ones before it too.
        device: torch's name of the device: "cpu", "cuda", "cuda:1".
        seed: of all random numbers.
        max_examples: cases drawn for each check of each op; None: what the level says.
        on_result: called with each result as it comes.

    Raises:
        ConfigError: an unknown op, check, case, level or device, or nothing to check.
        PluginError: `obj` is no backend that tvr would load.
        BackendUnavailable: the backend's probe says that it cannot run on the device.
    """
    selection = Selection(
        ops=None if ops is None else tuple(ops),
        checks=None if checks is None else tuple(checks),
        cases=None if cases is None else tuple(cases),
        level=level,
        seed=seed,
        max_examples=max_examples,
    )
    asked = units(selection)
    backend = Subject(obj, device_facts(device))
    results = []
    for unit in asked:
        for result in run_unit(backend, unit, selection):
            on_result(result)
            results.append(result)
    return results + missing_checks(backend.info, results, selection)


def _chosen(op: str, selection: Selection) -> list[Case]:
    if selection.cases is None:
        return cases(op, selection.level, selection.seed)
    named = {case.name: case for case in cases(op, "full", selection.seed)}
    return [named[text] if text in named else parse_case(op, text) for text in selection.cases]


def _judge(backend: Subject, check: Check, case: Case, seed: int) -> CheckResult:
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


def _says(error: BaseException) -> str:
    return (
        str(error) if isinstance(error, CheckFailed) else f"raised {type(error).__name__}: {error}"
    )


def _draw(
    backend: Subject, check: Check, op: str, selection: Selection, on_begin: OnBegin
) -> CheckResult:
    """Run a check on drawn cases; if one fails, the result is that of the smallest that does."""
    try:
        from tvr.conformance import drawing, strategies
    except ImportError as e:
        raise ConfigError(
            "conformance: cases are drawn by hypothesis, which is not installed; "
            "pip install 'tvr[conformance]', or ask for max_examples 0"
        ) from e
    began = time.perf_counter()
    worst: list[CheckResult] = []

    def fits(case: Case) -> bool:
        return check.applies(case) and not why_skipped(backend, check, case)

    def examine(case: Case) -> None:
        on_begin(case.handle)
        result = _judge(backend, check, case, selection.seed)
        worst.append(result)
        if result.failed:
            raise CheckFailed(result.detail)

    if check.of_declaration:
        drawn = strategies.any_cases(op, selection.level)
    else:
        drawn = strategies.cases(op, backend.info, backend.device, selection.level)
    num_seen, failure = drawing.find_failure(
        drawn.filter(fits), examine, seed=selection.seed, max_examples=selection.examples
    )
    seconds = time.perf_counter() - began
    if failure is not None:
        result = next(r for r in worst if r.case == failure.case.handle)
        return replace(result, seconds=seconds)
    if not num_seen:
        detail = "no case can be drawn that is declared and has what the check needs"
        return CheckResult(
            check=check.name, op=op, case=DRAWN, outcome=SKIPPED, detail=detail, seed=selection.seed
        )
    nearest = max(worst, key=lambda r: r.share)
    return CheckResult(
        check=check.name,
        op=op,
        case=DRAWN,
        outcome=PASSED,
        detail=f"{num_seen} cases",
        error=nearest.error,
        limit=nearest.limit,
        seconds=seconds,
        seed=selection.seed,
    )


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
