"""`tvr env`: what a bug report needs to say. No path of this machine is printed."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from tvr.errors import TvrError

PACKAGES = (
    *("tvr", "torch", "numpy", "pluggy", "typer", "safetensors", "tokenizers", "jinja2", "rich"),
    *("gguf", "huggingface_hub", "transformers", "triton", "pycuda", "nvidia-cuda-nvcc"),
)
COMPILERS = ("cc", "c++")

# An absolute path up to its last part; no URL.
_FOLDERS = re.compile(r"""(?<![\w./:])(?:[A-Za-z]:)?(?:[\\/][^\\/\s:'"]+)+[\\/]""")


def env(*, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, devices, compilers and backends, to paste into a bug report."""
    data = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{f"package {name}": _version(name) for name in PACKAGES},
        "compiler nvcc": _nvcc(),
        **{f"compiler {name}": _compiler(name) for name in COMPILERS},
        **_devices(),
        **_backends(),
    }
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    width = max(map(len, data))
    for name, value in data.items():
        typer.echo(f"{name:<{width}}  {value}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _nvcc() -> str:
    """Return the version and build of the nvcc that the CUDA backend takes, or why none."""
    from tvr.backends.pycuda_raw.nvcc import find_nvcc

    try:
        nvcc = find_nvcc()
    except TvrError as error:
        return without_paths(str(error))
    return f"{nvcc.version[0]}.{nvcc.version[1]} ({nvcc.build.rpartition('Build ')[2]})"


def _compiler(name: str) -> str:
    """Return the first line of a compiler's version."""
    if shutil.which(name) is None:
        return "not found"
    try:
        done = subprocess.run(
            [name, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {type(error).__name__}"
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if not lines:
        return f"says nothing, exit code {done.returncode}"
    return lines[0]


def _devices() -> dict[str, str]:
    import torch

    found = {"cpu threads": str(torch.get_num_threads())}
    if not torch.cuda.is_available():
        return {**found, "cuda": "torch sees no CUDA device"}
    found["cuda"] = f"torch was built for CUDA {torch.version.cuda}"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = facts.total_memory / 2**30
        found[f"cuda:{index}"] = f"{facts.name}, sm_{facts.major}{facts.minor}, {memory:.0f} GiB"
    return found


def _backends() -> dict[str, Any]:
    from tvr.core.backend import NOT_INSTALLED
    from tvr.core.loader import device_facts
    from tvr.core.plugin_config import PluginConfig, find_config
    from tvr.core.plugins import BackendManager

    try:
        config = PluginConfig.load(find_config(None, os.environ))
        with redirect_stdout(sys.stderr):  # what a plugin prints is no JSON
            manager = BackendManager(config, device=device_facts("auto"))
    except TvrError as error:
        return {"backends": without_paths(f"cannot be listed: {error}")}
    rows = {}
    for b in manager.explain()["backends"]:
        origin = f" from {b['distribution']} {b['version']}" if b["distribution"] else ""
        reasons = "".join(f"; {reason}" for reason in [*b["reasons"], *b["notes"]])
        known = "" if b["status"] == NOT_INSTALLED else reasons
        rows[f"backend {b['name']}"] = without_paths(f"{b['status']}{origin}{known}")
    return rows


def without_paths(text: str) -> str:
    """Return `text` without folders: an import error may name this machine's, and its user's."""
    # What lies below a folder of packages is their own; below the user's, it is the user's.
    known = dict.fromkeys([sys.prefix, *sys.path], "...")
    known |= {str(Path.home()): "/~", str(Path.cwd()): "/~"}
    for folder in sorted(known, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(folder, known[folder])
    return _FOLDERS.sub(".../", text)
