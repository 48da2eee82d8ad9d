"""One run of the suite: what was tested, with what, and what became of every check."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from tvr import __version__
from tvr.conformance.ledger import EXPECTED, PASSED, CheckResult
from tvr.contract import OPS, BackendInfo, DeviceFacts

_PACKAGES = ("torch", "pluggy", "hypothesis", "triton", "pycuda")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was tested, and on what; known in the process that loaded the backend.

    Attributes:
        backend: its name.
        distribution, version: the package it came from; None: it was given as an object.
        abi: version of the contract it was written for, "1.0".
        declared: ops it declares, in the contract's order.
        device: torch's name of the device, "cuda:0".
        device_name: marketing name.
        driver: version of the NVIDIA driver; None on a CPU, or where it is not to be had.
        versions: those of tvr, Python and the packages that results may depend on, by name.
    """

    backend: str
    distribution: str | None
    version: str | None
    abi: str
    declared: tuple[str, ...]
    device: str
    device_name: str
    driver: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class SuiteRun(Facts):
    """A run that is over.

    Attributes:
        level, seed, max_examples: as asked for; max_examples None: what the level says.
        ops, checks, cases: what the run was narrowed to; None: all.
        started: ISO 8601 with time zone.
        seconds: how long it took.
        results: one for each check and case, failures of the whole included.
    """

    level: str
    seed: int
    max_examples: int | None
    ops: tuple[str, ...] | None = None
    checks: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    started: str
    seconds: float
    results: list[CheckResult] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all that was asked for was checked, and is right or fails as expected."""
        ran = any(r.outcome in (PASSED, EXPECTED) for r in self.results)
        return bool(self.declared) and ran and not self.failures

    @property
    def failures(self) -> list[CheckResult]:
        """The failed results, in the order they came."""
        return [r for r in self.results if r.failed]


def facts_of(
    info: BackendInfo,
    device: DeviceFacts,
    *,
    distribution: str | None = None,
    version: str | None = None,
) -> Facts:
    """Return the facts of a backend that is loaded in this process."""
    return Facts(
        backend=info.name,
        distribution=distribution,
        version=version,
        abi=".".join(map(str, info.abi)),
        declared=tuple(op for op in OPS if op in info.ops),
        device=str(device),
        device_name=device.name if device.type != "cpu" else _cpu_name(),
        driver=_driver_version() if device.type == "cuda" else None,
        versions=_versions(),
    )


def _cpu_name() -> str:
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver, or None where nothing tells it."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    if shutil.which(asked[0]) is None:
        return None
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _versions() -> dict[str, str]:
    """Return the versions of tvr, Python, and the packages that are installed."""
    found = {"tvr": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
