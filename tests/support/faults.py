"""All planted faults: those of every `support/faults_*.py`, each with a list `FAULTS`."""

from __future__ import annotations

import importlib
from pathlib import Path

from support.fault import Fault, faulty

__all__ = ["FAULTS", "Fault", "faulty"]

FAULTS: list[Fault] = [
    fault
    for path in sorted(Path(__file__).parent.glob("faults_*.py"))
    for fault in getattr(importlib.import_module(f"support.{path.stem}"), "FAULTS", [])
]
