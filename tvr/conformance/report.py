"""Results as text."""

from __future__ import annotations

from collections.abc import Sequence

from tvr.conformance.ledger import FAILED, PASSED, SKIPPED, CheckResult


def format_results(results: Sequence[CheckResult]) -> str:
    """Return a count by outcome and a line for every failure."""
    counts = ", ".join(
        f"{sum(r.outcome == outcome for r in results)} {outcome}"
        for outcome in (PASSED, FAILED, SKIPPED)
    )
    failures = [f"{r.op}: {r.check} [{r.case}]: {r.detail}" for r in results if r.failed]
    return "\n".join([counts, *failures])
