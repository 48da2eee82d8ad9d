"""A run as one self-contained page: no script, no network, nothing to install.

`report.html` beside this file is the page, `report.css` its looks; here is what they show.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tvr import __version__
from tvr.conformance.ledger import EXPECTED, FAILED, PASSED, SKIPPED, CheckResult
from tvr.conformance.registry import CHECKS
from tvr.conformance.report import (
    by_unit,
    count,
    format_counts,
    format_error,
    reproduction,
    smallest_failure,
    write_report,
)
from tvr.conformance.suite_run import SuiteRun

#: Characters of a message that the page shows; the JSON report has it whole.
DETAIL_LENGTH = 400
#: The strip of a check, in pixels: error / limit from 10^-DECADES to 10^DECADES.
STRIP_WIDTH, STRIP_HEIGHT, DECADES = 240, 18, 3

Reproduce = Callable[[CheckResult], str]

_MARKS = {PASSED: "✓", FAILED: "✗", EXPECTED: "~", SKIPPED: "–"}


def write_html(path: str | Path, run: SuiteRun, reproduce: Reproduce | None = None) -> None:
    """Write the page of `run`; `reproduce` as for `as_html`.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_report(path, as_html(run, reproduce))


def as_html(run: SuiteRun, reproduce: Reproduce | None = None) -> str:
    """Return the page of `run`; whatever a backend wrote into a message is text on it.

    Args:
        run: the run.
        reproduce: returns the line that runs a failed case again; None: one of what `run` knows,
            which is not where its plugins or expected failures were read.
    """
    if reproduce is None:
        reproduce = partial(
            reproduction,
            backend=run.backend,
            level=run.level,
            device=run.device,
            max_examples=run.max_examples,
        )
    files = resources.files("tvr.conformance")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string((files / "report.html").read_text("utf-8"))
    claims = {check.name: check.claim for check in CHECKS}
    units = [_unit(results, claims) for results in by_unit(run.results).values()]
    verdict, verdict_class = _verdict(run)
    return page.render(
        run=run,
        css=Markup((files / "report.css").read_text("utf-8")),
        verdict=verdict,
        verdict_class=verdict_class,
        counts=format_counts(run.results),
        facts=_facts(run),
        failures=[_failure(unit, reproduce) for unit in units if unit["outcome"] == FAILED],
        ops=list(dict.fromkeys(unit["op"] for unit in units)),
        grid=_grid(units),
        units=sorted(units, key=lambda unit: unit["outcome"] != FAILED),
    )


def _verdict(run: SuiteRun) -> tuple[str, str]:
    if run.passed:
        return "passed", PASSED
    return ("failed", FAILED) if run.failures else ("nothing was checked", FAILED)


def _facts(run: SuiteRun) -> list[tuple[str, str]]:
    package = f"{run.distribution} {run.version}" if run.distribution else "given as an object"
    device = f"{run.device} ({run.device_name})" if run.device_name else run.device
    asked = {"ops": run.ops, "checks": run.checks, "cases": run.cases}
    level = run.level
    if run.max_examples is not None:
        level += f", at most {run.max_examples} examples"
    return [
        ("package", package),
        ("contract", run.abi),
        ("device", device),
        *([("driver", run.driver)] if run.driver else []),
        ("suite", f"tvr {__version__}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
        ("level", level),
        ("seed", str(run.seed)),
        *((f"only {what}", ", ".join(names)) for what, names in asked.items() if names),
        ("declares", ", ".join(run.declared) or "nothing"),
        ("started", f"{run.started}, took {run.seconds:.1f} s"),
    ]


def _unit(results: Sequence[CheckResult], claims: dict[str, str]) -> dict[str, Any]:
    """Return what the page shows of one check on one op."""
    op, check = results[0].op, results[0].check
    counts = count(results)
    outcome = next(o for o in (FAILED, EXPECTED, PASSED, SKIPPED) if counts[o])
    ran = [r for r in results if r.outcome != SKIPPED]
    skipped = Counter(r.detail for r in results if r.outcome == SKIPPED)
    return {
        "id": f"{op}--{check}",
        "op": op,
        "check": check,
        "claim": claims.get(check, ""),
        "results": results,
        "outcome": outcome,
        "counts": format_counts(results),
        "mark": _mark(outcome, counts),
        "ticks": _ticks(ran),
        "spread": _spread(ran),
        "rows": [_row(r) for r in sorted(ran, key=_worst_first)],
        "skipped": list(skipped.items()),
    }


def _grid(units: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """Return a row for each check: its unit on every op, or None."""
    ops = dict.fromkeys(unit["op"] for unit in units)
    checks = dict.fromkeys(unit["check"] for unit in units)
    found = {(unit["op"], unit["check"]): unit for unit in units}
    return [(check, [found.get((op, check)) for op in ops]) for check in checks]


def _failure(unit: dict[str, Any], reproduce: Reproduce) -> dict[str, Any]:
    smallest = smallest_failure(unit["results"])
    return {
        "unit": unit,
        "case": smallest.case,
        "detail": _short(smallest.detail),
        "numbers": format_error(smallest),
        "line": reproduce(smallest),
    }


def _row(result: CheckResult) -> dict[str, Any]:
    compared = result.error is not None
    return {
        "case": result.case,
        "text": "" if result.text == result.case else result.text,
        "outcome": result.outcome,
        "share": f"{result.share:.3g}" if compared else "",
        "over": result.share > 1,
        "width": round(100 * _place(result.share)),
        "error": f"{result.error:.3g}" if compared else "",
        "limit": f"{result.limit:.3g}" if compared else "",
        "seconds": f"{result.seconds:.3f}",
        "detail": _short(result.detail),
    }


def _worst_first(result: CheckResult) -> tuple[bool, bool, float]:
    return not result.failed, result.outcome != EXPECTED, -result.share


def _place(share: float) -> float:
    """Return where error / limit lies on the log scale, 0 to 1; 0.5 is the limit."""
    if share <= 0:
        return 0.0
    decades = min(max(math.log10(share), -DECADES), DECADES)
    return (decades + DECADES) / (2 * DECADES)


def _ticks(results: Sequence[CheckResult]) -> list[tuple[str, str]]:
    """Return an SVG path of one tick a case for each outcome, failures drawn last, on top."""
    places: dict[str, set[int]] = {PASSED: set(), EXPECTED: set(), FAILED: set()}
    for result in results:
        if result.error is not None:
            places[result.outcome].add(round(1 + _place(result.share) * (STRIP_WIDTH - 2)))
    return [
        (outcome, "".join(f"M{x} 2v{STRIP_HEIGHT - 4}" for x in sorted(xs)))
        for outcome, xs in places.items()
        if xs
    ]


def _spread(results: Sequence[CheckResult]) -> str:
    """Return the strip in words, for who cannot see it."""
    shares = [r.share for r in results if r.error is not None]
    if not shares:
        return ""
    return f"error / limit: median {statistics.median(shares):.2g}, largest {max(shares):.2g}"


def _short(text: str) -> str:
    return text if len(text) <= DETAIL_LENGTH else f"{text[:DETAIL_LENGTH]} … ({len(text)} letters)"


def _mark(outcome: str, counts: dict[str, int]) -> str:
    """Return "✓ 12", "✗ 3/12" or "– 4": what a cell of the grid says."""
    number = counts[outcome]
    ran = sum(counts.values()) - counts[SKIPPED]
    of = f"/{ran}" if outcome in (FAILED, EXPECTED) else ""
    return f"{_MARKS[outcome]} {number}{of}"
