"""What importing the contract costs: a plugin's entry point should be cheap to look at."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_without(blocked: list[str], code: str) -> None:
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (["torch", "numpy", "pluggy"], "import tvr"),
        (["torch", "numpy", "pluggy"], "import tvr.errors, tvr.contract"),
        (["torch", "numpy"], "import tvr.hookspecs; from tvr import hookimpl"),
        (
            ["torch", "numpy"],
            "from tvr.contract import DeviceFacts\n"
            "from tvr.core.plugins import BackendManager\n"
            "BackendManager(device=DeviceFacts(type='cpu'), installed=())",
        ),
    ],
)
def test_it_imports_without(blocked, code):
    run_without(blocked, code)
