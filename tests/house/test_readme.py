"""The README says what is true, and its quick start is two commands."""

from __future__ import annotations

import re
from pathlib import Path

from tvr.backends.pycuda_raw.plugin import PycudaBackend
from tvr.backends.torch_ref import plugin as torch_ref
from tvr.backends.triton import plugin as triton
from tvr.contract import OPS

README = (Path(__file__).parents[2] / "README.md").read_text()
BACKENDS = [PycudaBackend(), triton, torch_ref]


def backend_row(plugin) -> str:
    """Return a backend's row of the README's table."""
    info = plugin.tvr_backend_info()
    boxes = [box for boxes in info.ops.values() for box in boxes]

    def union(attribute: str) -> str:
        return ", ".join(dict.fromkeys(v for box in boxes for v in getattr(box, attribute)))

    missing = [op for op in OPS if op not in info.ops]
    ops = "all" + (f" but {', '.join(missing)}" if missing else "")
    return f"| `{info.name}` | {union('devices')} | {union('dtypes')} | {ops} |"


def test_the_backend_table_is_made_from_backend_info():
    table = re.search(r"<!-- backends:.*?-->\n(.*?)<!-- /backends -->", README, re.S).group(1)
    assert table.splitlines()[2:] == [backend_row(plugin) for plugin in BACKENDS]


def test_the_quick_start_is_two_commands():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.S)
    assert len(blocks) == 2
    run, test = blocks
    assert len(run.strip().splitlines()) == len(test.strip().splitlines()) == 1
    assert "tvr run" in run
    assert "[test]" in test
    assert "&& pytest" in test
