"""Running the suite, unit by unit: one check of one op, on its named cases and on drawn ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from tvr.conformance.case import Case, parse_case
from tvr.conformance.cases import cases
from tvr.conformance.judging import judge
from tvr.conformance.ledger import FAILED, SKIPPED, CheckResult
from tvr.conformance.registry import CHECKS, SUBJECTS
from tvr.conformance.selection import Selection, refuse_unknown
from tvr.conformance.subject import Subject, device_facts
from tvr.contract import OPS
from tvr.errors import ConfigError

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
    named = [case for case in _chosen(unit.op, selection) if check.applies(case)]
    for case in named[skip:]:
        on_begin(case.handle)
        yield judge(backend, check, case, selection.seed)
    if selection.examples and unit.op in OPS and skip <= len(named):
        yield _judge_drawn()(backend, check, unit.op, selection, named=named, on_begin=on_begin)


def missing_checks(
    declared: Collection[str], results: Iterable[CheckResult], selection: Selection
) -> list[CheckResult]:
    """Return a failure for each of the `declared` ops that is selected and was run on no case."""
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
        if op in declared and op not in ran
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
    for result in missing_checks(backend.info.ops, results, selection):
        on_result(result)
        results.append(result)
    return results


def _chosen(op: str, selection: Selection) -> list[Case]:
    if selection.cases is None:
        return cases(op, selection.level, selection.seed)
    named = {case.name: case for case in cases(op, "full", selection.seed)}
    return [named[text] if text in named else parse_case(op, text) for text in selection.cases]


def _judge_drawn() -> Callable[..., CheckResult]:
    try:
        from tvr.conformance.drawn import judge_drawn
    except ModuleNotFoundError as e:
        if e.name != "hypothesis":
            raise
        raise ConfigError(
            "conformance: hypothesis draws the cases, and is not installed; pip install "
            "'tvr[conformance]', in a clone pip install -e '.[conformance]', or ask for "
            "max_examples 0"
        ) from e
    return judge_drawn
