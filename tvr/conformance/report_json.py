"""A run as JSON, for programs. docs/conformance.md describes every key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tvr import __version__
from tvr.conformance.ledger import CheckResult
from tvr.conformance.report import count, write_report
from tvr.conformance.suite_run import SuiteRun

#: Goes up when a key changes its meaning or goes away; new keys may come at any time.
SCHEMA = 1


def write_json(path: str | Path, run: SuiteRun) -> None:
    """Write `run` as one JSON object.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_report(path, json.dumps(as_json(run), indent=1, allow_nan=False) + "\n")


def as_json(run: SuiteRun) -> dict[str, Any]:
    """Return `run` as what JSON can hold; a NaN or an infinity is given as a string."""
    return {
        "schema": SCHEMA,
        "suite_version": __version__,
        "backend": run.backend,
        "distribution": run.distribution,
        "distribution_version": run.version,
        "abi": run.abi,
        "declared": list(run.declared),
        "device": run.device,
        "device_name": run.device_name,
        "driver": run.driver,
        "versions": dict(run.versions),
        "level": run.level,
        "seed": run.seed,
        "max_examples": run.max_examples,
        "ops": _list(run.ops),
        "checks": _list(run.checks),
        "cases": _list(run.cases),
        "started": run.started,
        "seconds": run.seconds,
        "passed": run.passed,
        "counts": count(run.results),
        "results": [_result(result) for result in run.results],
    }


def _result(result: CheckResult) -> dict[str, Any]:
    return {
        "op": result.op,
        "check": result.check,
        "case": result.case,
        "text": result.text,
        "status": result.outcome,
        "error": _number(result.error),
        "limit": _number(result.limit),
        "seconds": result.seconds,
        "seed": result.seed,
        "detail": result.detail,
    }


def _number(value: float | None) -> float | str | None:
    """Return the value; JSON has no NaN and no infinity, so these become their names."""
    return value if value is None or math.isfinite(value) else str(value)


def _list(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)
