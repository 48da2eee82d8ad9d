"""What `tvr conformance` prints: a table of ops and checks, the failures, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tvr.cli.output import text_writer
from tvr.conformance.ledger import EXPECTED, OUTCOMES, SKIPPED, CheckResult
from tvr.conformance.report import (
    by_unit,
    count,
    format_counts,
    format_error,
    smallest_failure,
)
from tvr.conformance.suite_run import SuiteRun
from tvr.contract import OPS

#: Reasons of skips that are listed; the rarer ones are summed up.
MOST_REASONS = 12

Reproduce = Callable[[CheckResult], str]


def print_run(run: SuiteRun, reproduce: Reproduce, *, num_left: int = 0) -> None:
    """Print what a run found, the verdict last.

    Args:
        run: the run.
        reproduce: returns the shell line that runs a failed case again.
        num_left: checks that were not run, since the run was interrupted.
    """
    end = verdict(run)
    if num_left:
        done = format_counts(run.results)
        end = f"interrupted: {num_left} checks were not run; {done}; no report was written"
    blocks = [_heading(run), _table(run), _skips(run), *_failures(run, reproduce), end]
    text_writer()("\n\n".join(block for block in blocks if block) + "\n")


def verdict(run: SuiteRun) -> str:
    """Return the line that says whether the backend passed."""
    if not run.declared:
        return f"FAILED: {run.backend} declares no op, so nothing was checked"
    if run.failures:
        failed = len(by_unit(run.failures))
        return (
            f"FAILED: {failed} of {len(by_unit(run.results))} checks; {format_counts(run.results)}"
        )
    if not run.passed:
        return f"FAILED: nothing was checked; {format_counts(run.results)}"
    narrowed = [
        f"--{name}" for name in ("op", "check", "case") if getattr(run, f"{name}s") is not None
    ]
    of_what = f"what {', '.join(narrowed)} asked for" if narrowed else "every declared op"
    return f"passed: {of_what} was checked at level {run.level}; {format_counts(run.results)}"


def _heading(run: SuiteRun) -> str:
    origin = f" ({run.distribution} {run.version})" if run.distribution else ""
    device = f"{run.device} ({run.device_name})" if run.device_name else run.device
    return (
        f"{run.backend}{origin}, contract {run.abi}, on {device}\n"
        f"level {run.level}, seed {run.seed}, {run.seconds:.1f} s"
    )


def _table(run: SuiteRun) -> str:
    """Return one block for each op, a line for each check that was not skipped throughout."""
    units = by_unit(run.results)
    width = max((len(check) for _, check in units), default=0)
    shown = [o for o in OUTCOMES if o != EXPECTED or any(r.outcome == o for r in run.results)]
    blocks = []
    undeclared = _undeclared(run)
    for op in dict.fromkeys(op for op, _ in units if op not in undeclared):
        checks = {check: count(found) for (o, check), found in units.items() if o == op}
        ran = {check: n for check, n in checks.items() if sum(n.values()) > n[SKIPPED]}
        lines = [f"{op:<{width + 2}}" + "".join(f"{outcome:>10}" for outcome in shown)]
        lines += [f"  {check:<{width}}" + _cells(n, shown) for check, n in ran.items()]
        if left := len(checks) - len(ran):
            lines.append(f"  {left} other check{'s' * (left > 1)}: all skipped")
        blocks.append("\n".join(lines))
    if undeclared:
        blocks.append(f"not declared: {', '.join(undeclared)}")
    return "\n\n".join(blocks)


def _undeclared(run: SuiteRun) -> list[str]:
    """Return the ops that need no block of their own: not declared, and rightly so."""
    failed = {result.op for result in run.failures}
    asked = dict.fromkeys(result.op for result in run.results)
    return [op for op in OPS if op in asked and op not in failed and op not in run.declared]


def _cells(counts: dict[str, int], shown: Sequence[str]) -> str:
    return "".join(f"{counts[outcome] or '-':>10}" for outcome in shown)


def _skips(run: SuiteRun) -> str:
    """Return the reasons of skips, the most frequent first; those of undeclared ops are clear."""
    undeclared = _undeclared(run)
    skipped = (r for r in run.results if r.outcome == SKIPPED and r.op not in undeclared)
    reasons = Counter(result.detail for result in skipped)
    if not reasons:
        return ""
    lines = [f"{number:>8}  {reason}" for reason, number in reasons.most_common(MOST_REASONS)]
    if rest := reasons.total() - sum(number for _, number in reasons.most_common(MOST_REASONS)):
        lines.append(f"{rest:>8}  {len(reasons) - MOST_REASONS} other reasons")
    return "\n".join(["skipped, and why:", *lines])


def _failures(run: SuiteRun, reproduce: Reproduce) -> list[str]:
    """Return a block for each check that failed, and for each failure that is of no case."""
    blocks = []
    for (op, check), results in by_unit(run.results).items():
        failed = [result for result in results if result.failed]
        shown = [result for result in failed if not result.text]
        if len(shown) < len(failed):
            shown.append(smallest_failure(failed))
        heading = f"FAILED {op}: {check}: {format_counts(results)}"
        blocks += ["\n".join([heading, *_failure(result, reproduce)]) for result in shown]
    return blocks


def _failure(result: CheckResult, reproduce: Reproduce) -> list[str]:
    lines = [f"  {result.detail}"]
    if numbers := format_error(result):
        lines.append(f"  {numbers}")
    if result.text:
        name = "" if result.case == result.text else f"{result.case}: "
        lines.append(f"  smallest failing case: {name}{result.text}")
    return [*lines, f"  {reproduce(result)}"]
