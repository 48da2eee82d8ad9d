"""The Triton backend's kernels compile for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

from support.compile_triton import spills_in_loops
from tvr.contract import DTYPES, OPS

TESTS = Path(__file__).parents[1]
SMS = ("80", "90", "120")
LINE = re.compile(r"(\w+) sm_(\d+) (\w+)  (\w+): .* bytes spilled, (\d+) times in loops, .*")


def compile_all(
    cache: Path, *options: str, sms: tuple[str, ...] = SMS, dtypes: tuple[str, ...] = DTYPES
) -> dict[tuple[str, str, str], dict[str, int]]:
    """Return the kernels and their spills in loops, by (op, sm, dtype), of a process of its own.

    It warns of nothing, and finds nothing compiled in the cache.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(TESTS), "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "support.compile_triton", *options]
    done = subprocess.run(
        [*command, "--sm", ",".join(sms), "--dtype", ",".join(dtypes)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for line in done.stdout.splitlines():
        op, sm, dtype, kernel, spilled = LINE.fullmatch(line).groups()
        found[op, sm, dtype][kernel] = max(int(spilled), found[op, sm, dtype].get(kernel, 0))
    return dict(found)


def spilled_in_decode(found: dict[tuple[str, str, str], dict[str, int]]) -> dict[object, object]:
    """Return what the loops of decode spill: all that they work on has to be in registers.

    What is needed before and after a loop alone may wait in memory, and does where a thread's 255
    registers, or its share of them with more programs beside it, are full.
    """
    return {
        of: kernels
        for of, kernels in found.items()
        if of[0] == "attention_decode" and any(kernels.values())
    }


@pytest.mark.slow
def test_every_kernel_compiles_for_every_gpu_and_dtype(tmp_path):
    """In all pairs but for `sample`, which takes as long as all the others.

    Of its kernels a dtype changes no more than how a logit is loaded: each GPU has one dtype.
    """
    found = compile_all(tmp_path, "--turns", "sample")
    others = set(OPS) - {"sample"}
    turns = {("sample", *pair) for pair in zip(SMS, DTYPES, strict=True)}
    assert set(found) == turns | set(product(others, SMS, DTYPES))
    assert spilled_in_decode(found) == {}


@pytest.mark.slow
def test_attention_of_larger_heads_compiles_for_every_gpu(tmp_path):
    ops = ("attention_decode", "attention_prefill")
    found = compile_all(tmp_path, *ops, "--head-dim", "128", dtypes=("bfloat16",))
    assert set(found) == set(product(ops, SMS, ("bfloat16",)))
    assert spilled_in_decode(found) == {}


@pytest.mark.slow
def test_kernels_compile_where_every_integer_is_1(tmp_path):
    """Triton makes such arguments constants, on which some operations do not exist."""
    dtypes = ("float32", "bfloat16")
    found = compile_all(tmp_path, "--ones", sms=("90",), dtypes=dtypes)
    assert set(found) == set(product(OPS, ("90",), dtypes))


SASS = """
 STL [R1], R0 ;
.L_x_0:
 LDL R5, [R1] ;
.L_x_1:
 LDL R2, [R1+0x4] ;
 STL [R1+0x8], R3 ;
 @P0 BRA `(.L_x_1) ;
 @P1 BRA `(.L_x_2) ;
 LDL R4, [R1] ;
.L_x_2:
 @P2 BRA `(.L_x_0) ;
.L_x_3:
 BRA `(.L_x_3);
"""


def test_spills_are_counted_in_innermost_loops_only():
    assert spills_in_loops(SASS.splitlines()) == 2
