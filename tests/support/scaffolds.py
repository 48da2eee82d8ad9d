"""Packages of `tvr backend new`, made importable with real metadata and without pip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.plugins import install
from tvr.scaffold import Package


def install_scaffold(site: Path, name: str, ops: Sequence[str]) -> Package:
    """Install the package that `tvr backend new NAME --ops OPS` writes into `site`."""
    package = Package(name, tuple(ops))
    files = package.files()
    install(
        site,
        package.distribution,
        entry_points={name: f"{package.module}.plugin"},
        sources={path: text for path, text in files.items() if path.startswith(package.module)},
    )
    return package
