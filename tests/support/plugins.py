"""Third-party packages made importable with real metadata, without pip and without a network."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAMPLES = Path(__file__).parents[1] / "plugins"
EXAMPLES = Path(__file__).parents[2] / "examples"


def install(
    site: Path,
    name: str,
    *,
    entry_points: Mapping[str, str],
    sources: Mapping[str, str] | None = None,
    version: str = "1.0",
    group: str = "tvr.backends.v1",
) -> Path:
    """Write a distribution into `site` as an installer would, and return `site`.

    Args:
        site: a folder to be put on `sys.path` or PYTHONPATH.
        entry_points: backend name -> "module" or "module:attribute".
        sources: file name -> text of the modules.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    files = dict(sources or {})
    for file, text in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lines = [f"{backend} = {value}" for backend, value in entry_points.items()]
    with (info / "entry_points.txt").open("a") as f:
        f.write("\n".join([f"[{group}]", *lines, ""]))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    records = [*files, *(f"{info.name}/{n}" for n in ("METADATA", "RECORD", "entry_points.txt"))]
    (info / "RECORD").write_text("".join(f"{record},,\n" for record in records))
    return site


def install_sample(site: Path, package: str) -> Path:
    """Install one of the packages under tests/plugins (`tvr_only_rope`, ...) into `site`."""
    return _install_from(site, SAMPLES / package, package)


def install_example(site: Path, package: str) -> Path:
    """Install one of the packages under examples (`tvr_sdpa`, ...) into `site`."""
    return _install_from(site, EXAMPLES / package.replace("_", "-"), package)


def _install_from(site: Path, root: Path, package: str) -> Path:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    sources = {str(p.relative_to(root)): p.read_text() for p in root.glob(f"{package}/**/*.py")}
    return install(
        site,
        project["name"],
        entry_points=project["entry-points"]["tvr.backends.v1"],
        sources=sources,
        version=project["version"],
    )
