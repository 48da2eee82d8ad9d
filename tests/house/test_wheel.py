"""What a wheel of the project holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_ships_package_data_and_nothing_else(tmp_path):
    """A missing data file would show only on users' machines: editable installs have them all."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("tvr-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tvr/py.typed", "tvr/plugins.toml", "tvr/__init__.py"} <= set(names)
    assert {"tvr/backends/triton/tuned.json", "tvr/serve/page.html"} <= set(names)
    demo = {f"tvr/demo/{file.name}" for file in (ROOT / "tvr" / "demo").glob("*.*")}
    assert "tvr/demo/model.safetensors" in demo
    assert demo <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"tvr", "_tvr_pytest.py"}
    suite = {f"tvr/conformance/{name}" for name in ("test_conformance.py", "report.html")}
    assert suite <= set(names)
    kernels = (ROOT / "tvr" / "backends" / "pycuda_raw" / "cuda").glob("*.cu*")
    shipped = {f"tvr/backends/pycuda_raw/cuda/{source.name}" for source in kernels}
    assert "tvr/backends/pycuda_raw/cuda/fd_split.cu" in shipped
    assert shipped <= set(names)
    entry_points = next(n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[tvr.backends.v1]" in text
    assert "tvr = tvr.cli:main" in text
    assert "[pytest11]\ntvr = _tvr_pytest" in text
