"""`tvr.core` as a library of its own."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import tvr.core

IMPORT_ALONE = """
import sys

allowed = set(sys.stdlib_module_names) | {"tvr"}

class OnlyStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(f"tvr.core wants {name}")

sys.meta_path.insert(0, OnlyStandardLibrary())
from tvr.core import BlockManager, Scheduler, Sequence
scheduler = Scheduler(
    num_blocks=8, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64
)
scheduler.add(Sequence("a", [1, 2], max_tokens=1))
print(scheduler.schedule().num_tokens)
"""


def test_core_needs_the_standard_library_only():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE],
        cwd=Path(tvr.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(tvr.core).failed == 0
    assert doctest.testmod(tvr.core).attempted > 3


def test_every_exported_name_exists_and_is_documented():
    for name in tvr.core.__all__:
        assert getattr(tvr.core, name).__doc__, name
