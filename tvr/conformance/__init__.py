"""The conformance suite: does a backend keep the contract, and how would one know?"""

from __future__ import annotations

from tvr.conformance.expected import Expected
from tvr.conformance.ledger import Check, CheckFailed, CheckResult
from tvr.conformance.pytest_door import parametrize_checks
from tvr.conformance.registry import CHECKS
from tvr.conformance.report import format_results
from tvr.conformance.suite import check_backend

__all__ = [
    "CHECKS",
    "Check",
    "CheckFailed",
    "CheckResult",
    "Expected",
    "check_backend",
    "format_results",
    "parametrize_checks",
]
