"""Failures known beforehand: a file lists them, each with its reason, and they are strict."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tvr.conformance.ledger import EXPECTED, FAILED, SKIPPED, CheckResult
from tvr.conformance.registry import CHECKS, SUBJECTS
from tvr.conformance.selection import shortened, suggestion
from tvr.contract import OPS
from tvr.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A check that is expected to fail.

    Attributes:
        op: the op it fails for, or "engine".
        check: its name.
        reason: why; cite a tracker number where there is one.
        case: pattern (`*`, `?`, `[...]`) of the names or texts of the cases that fail.

    Raises:
        ConfigError: no such op or check, a check that does not judge the op, or no reason.
    """

    op: str
    check: str
    reason: str
    case: str = "*"

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"expected failure: {name} is {value!r}; it must be some text")
        known = [check.name for check in CHECKS if self.op in check.ops]
        if self.op not in SUBJECTS:
            raise ConfigError(
                f"expected failure: {suggestion(self.op, SUBJECTS)}op {self.op!r} is not known; "
                f"known: {shortened(SUBJECTS)}"
            )
        if self.check not in known:
            raise ConfigError(
                f"expected failure: {suggestion(self.check, known)}no check {self.check!r} judges "
                f"{self.op}; those that do: {shortened(known)}"
            )

    def covers(self, result: CheckResult) -> bool:
        """Return whether it is of this check, op and case."""
        return (self.op, self.check) == (result.op, result.check) and any(
            fnmatchcase(handle, self.case) for handle in (result.case, result.text)
        )


def load_expected(path: str | Path) -> list[Expected]:
    """Read a TOML file of `[[expected]]` tables, the keys of each being those of `Expected`.

    Raises:
        ConfigError: the file cannot be read, or an entry is not acceptable; says which.
    """
    try:
        content = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as e:
        raise ConfigError(f"file of expected failures {path} cannot be read: {e.strerror}") from e
    except ValueError as e:  # no TOML, or not UTF-8
        raise ConfigError(f"{path} is not valid TOML: {' '.join(str(e).split())}") from e
    entries = content.pop("expected", [])
    if content or not isinstance(entries, list):
        raise ConfigError(f"{path} must hold [[expected]] tables and nothing else")
    if not entries:
        raise ConfigError(f"{path} holds no [[expected]] table; write one, or drop the file")
    return [_entry(f"{path}, entry {i}", entry) for i, entry in enumerate(entries, start=1)]


def apply_expected(
    results: Iterable[CheckResult], entries: Sequence[Expected], *, all_cases: bool = True
) -> list[CheckResult]:
    """Return the results with expected failures marked, and what is wrong with `entries` added.

    A result that an entry covers must have failed: one that passed becomes a failure. A skipped
    one stays as it is. An entry of a check that was run, but that covers no case of it, adds a
    failure.

    Args:
        results: those of a run.
        entries: the failures expected.
        all_cases: False: only some cases were run, so that an entry need not cover any.
    """
    results = list(results)
    judged = [_judged(result, entries) for result in results]
    ran = [result for result in results if result.outcome != SKIPPED]
    for entry in entries if all_cases else ():
        asked = [r for r in results if (r.op, r.check) == (entry.op, entry.check)]
        if asked and not any(entry.covers(result) for result in ran):
            detail = (
                f"expected to fail on {entry.case!r} ({entry.reason}), but no such case was run; "
                "drop the entry"
            )
            judged.append(_unmet(entry, detail, asked[0].seed))
    return judged


def of_undeclared(
    entries: Iterable[Expected],
    declared: Collection[str],
    results: Iterable[CheckResult],
    *,
    seed: int,
) -> list[CheckResult]:
    """Return a failure for each entry of an undeclared op: no run can ever meet it.

    Args:
        entries: the failures expected.
        declared: the ops that the backend declares.
        results: those of a run, after `apply_expected`, which has judged entries of its checks.
        seed: of the run.
    """
    judged = {(result.op, result.check) for result in results}
    why = "but {} is not declared; drop the entry"
    return [
        _unmet(entry, f"expected to fail ({entry.reason}), {why.format(entry.op)}", seed)
        for entry in entries
        if entry.op in OPS and entry.op not in declared and (entry.op, entry.check) not in judged
    ]


def _unmet(entry: Expected, detail: str, seed: int) -> CheckResult:
    return CheckResult(
        check=entry.check, op=entry.op, case="", outcome=FAILED, detail=detail, seed=seed
    )


def _judged(result: CheckResult, entries: Sequence[Expected]) -> CheckResult:
    entry = next((entry for entry in entries if entry.covers(result)), None)
    if entry is None or result.outcome == SKIPPED:
        return result
    if result.failed:
        return replace(result, outcome=EXPECTED, detail=f"{entry.reason}: {result.detail}")
    detail = f"passed, but is expected to fail ({entry.reason}); drop the entry"
    return replace(result, outcome=FAILED, detail=detail)


def _entry(where: str, entry: Any) -> Expected:  # noqa: ANN401
    known = {f.name for f in fields(Expected)}
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a table, [[expected]]")
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"{where}: key {unknown[0]!r} is not known; known: {', '.join(known)}")
    if missing := sorted({"op", "check", "reason"} - set(entry)):
        raise ConfigError(f"{where}: {missing[0]} is missing")
    try:
        return Expected(**entry)
    except ConfigError as e:
        raise ConfigError(f"{where}: {e}") from e
