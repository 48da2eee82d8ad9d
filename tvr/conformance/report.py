"""Results as text: counts, failures, and the line that runs one of them again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from tvr.conformance.case import parse_case
from tvr.conformance.ledger import EXPECTED, OUTCOMES, CheckResult
from tvr.conformance.suite import IS_CHECKED
from tvr.errors import ConfigError

#: Failed cases that a report in text names; a broken op fails by the hundred.
NAMED_CASES = 8


def format_results(results: Sequence[CheckResult]) -> str:
    """Return a count by outcome and a line for every failure."""
    failures = [f"{r.op}: {r.check} [{r.case}]: {r.detail}" for r in results if r.failed]
    return "\n".join([format_counts(results), *failures])


def format_counts(results: Iterable[CheckResult]) -> str:
    """Return "12 passed, 1 failed, 0 skipped"; expected failures are named only if there are."""
    counts = count(results)
    shown = [outcome for outcome in OUTCOMES if counts[outcome] or outcome != EXPECTED]
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in shown)


def count(results: Iterable[CheckResult]) -> dict[str, int]:
    """Return the number of results of each outcome, all outcomes included."""
    counts = dict.fromkeys(OUTCOMES, 0)
    for result in results:
        counts[result.outcome] += 1
    return counts


def by_unit(results: Iterable[CheckResult]) -> dict[tuple[str, str], list[CheckResult]]:
    """Return (op, check) -> its results, in the order they came."""
    found: dict[tuple[str, str], list[CheckResult]] = {}
    for result in results:
        found.setdefault((result.op, result.check), []).append(result)
    return found


def smallest_failure(results: Iterable[CheckResult]) -> CheckResult:
    """Return the failed result whose case has the fewest elements.

    Raises:
        ValueError: none failed.
    """
    return min((r for r in results if r.failed), key=_size)


def _size(result: CheckResult) -> float:
    """Return the elements of the call; a failure that has no case counts as larger than any."""
    return parse_case(result.op, result.text).size if result.text else math.inf


def format_error(result: CheckResult) -> str:
    """Return "error 0.0021, limit 0.0005 (error / limit = 4.2)"; "": nothing numeric."""
    if result.error is None:
        return ""
    return (
        f"error {result.error:.3g}, limit {result.limit:.3g} (error / limit = {result.share:.3g})"
    )


def reproduction(
    result: CheckResult,
    *,
    backend: str,
    level: str,
    device: str = "cpu",
    plugins: str | Path | None = None,
    expect: str | Path | None = None,
    max_examples: int | None = None,
) -> str:
    """Return the shell line that runs this check on this case alone, or on all if it has none."""
    words = ["tvr", "conformance", "--backend", backend, "--op", result.op]
    if result.check != IS_CHECKED:
        words += ["--check", result.check]
    if result.text:
        words += ["--case", result.case]
    elif max_examples is not None:
        words += ["--max-examples", str(max_examples)]
    words += ["--level", level]
    if result.seed:
        words += ["--seed", str(result.seed)]
    if device != "cpu":
        words += ["--device", device]
    if plugins is not None:
        words += ["--plugins", str(plugins)]
    if expect is not None:
        words += ["--expect", str(expect)]
    return shlex.join(words)


def reproduction_in_python(
    result: CheckResult,
    *,
    backend: str,
    level: str,
    device: str = "cpu",
    max_examples: int | None = None,
) -> str:
    """Return the same as a call, for a backend that is an object and not installed."""
    words = [f"<{backend}>", f"ops=[{result.op!r}]"]
    if result.check != IS_CHECKED:
        words.append(f"checks=[{result.check!r}]")
    if result.text:
        words.append(f"cases=[{result.case!r}]")
    elif max_examples is not None:
        words.append(f"max_examples={max_examples}")
    words.append(f"level={level!r}")
    if result.seed:
        words.append(f"seed={result.seed}")
    if device != "cpu":
        words.append(f"device={device!r}")
    return f"check_backend({', '.join(words)})"


def format_failure(results: Sequence[CheckResult], line: str) -> str:
    """Return what one check found on one op: the smallest failing case, then the other ones.

    Args:
        results: of that op and check; one failed at least.
        line: `reproduction` of the smallest failing case.
    """
    smallest = smallest_failure(results)
    failed = [r for r in results if r.failed]
    lines = [f"{smallest.op}: {smallest.check}: {format_counts(results)}"]
    if smallest.case:
        lines.append(f"smallest failing case: {smallest.case}")
    if smallest.text and smallest.text != smallest.case:
        lines.append(f"  {smallest.text}")
    lines.append(f"  {smallest.detail}")
    if numbers := format_error(smallest):
        lines.append(f"  {numbers}")
    lines.append(f"reproduce: {line}")
    others = [r for r in failed if r is not smallest]
    for r in others[:NAMED_CASES]:
        first_line = r.detail.partition("\n")[0]
        lines.append(f"also failing: {r.case}: {first_line}")
    if len(others) > NAMED_CASES:
        lines.append(f"and {len(others) - NAMED_CASES} more")
    return "\n".join(lines)


def write_report(path: str | Path, text: str) -> None:
    """Write a report file in UTF-8.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        # What a backend put into a message may hold lone surrogates, which are not UTF-8.
        Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as e:
        raise ConfigError(f"report {path} cannot be written: {e.strerror}") from e
