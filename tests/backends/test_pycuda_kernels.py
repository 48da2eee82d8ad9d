"""The CUDA kernels, all but those for one architecture, by the conformance suite on a CPU.

Every access to memory is checked, so a race or a read past a tensor's end fails too.
"""

from __future__ import annotations

import pytest

from support.cuda_on_cpu.backend import PycudaOnCpu
from support.cuda_on_cpu.gpu import CpuGpu
from support.cuda_on_cpu.library import why_not
from tvr.conformance import check_backend, format_results
from tvr.contract import OPS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

_SLOW = ("attention_decode", "attention_prefill", "engine")


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] if op in _SLOW else []) for op in (*OPS, "engine")],
)
def test_the_kernels_pass_the_suite(op):
    results = check_backend(PycudaOnCpu(CpuGpu(checked=True)), ops=[op])
    assert not any(result.failed for result in results), format_results(results)
