"""The package that `tvr backend new` writes: a backend of one's own that works as it stands."""

from __future__ import annotations

from tvr.scaffold.package import Package

__all__ = ["Package"]
