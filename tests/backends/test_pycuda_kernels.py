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

_SPLIT = "num_heads=12 num_kv_heads=2 head_dim=64 block_size=32 q_lens=1,1,1 kv_lens=1025,3,300"
_CHUNKS = "num_heads=6 num_kv_heads=2 head_dim=64 block_size=32 q_lens=90,3 kv_lens=300,70"
_MANY = ",".join(str(i % 3) for i in range(1030))
#: Large enough for what "smoke" is too small for: loops that are gone through more than once, the
#: merging of splits, and rows that are no multiple of 16 bytes.
_LARGER = {
    "rms_norm": ["dtype=bfloat16 hidden_size=8192 num_tokens=3"],
    "add_rms_norm": ["dtype=float16 hidden_size=5001 num_tokens=3"],
    "rope": ["dtype=float16 num_heads=40 num_kv_heads=8 head_dim=128 num_tokens=5"],
    "silu_mul": ["dtype=bfloat16 intermediate_size=9001 num_tokens=3"],
    "argmax": ["dtype=float16 vocab_size=70001 num_tokens=3"],
    "linear": [
        "dtype=bfloat16 in_features=6000 out_features=20 max_rows=8 num_tokens=3",
        "dtype=float16 in_features=5003 out_features=20 bias=True max_rows=8 num_tokens=8",
        "dtype=float32 in_features=6000 out_features=20 max_rows=8 num_tokens=3",
        "dtype=bfloat16 in_features=10000 out_features=19 max_rows=8 num_tokens=1",
    ],
    "fused_linear": [
        "dtype=bfloat16 in_features=6000 out_features=20 rms_norm=True max_rows=1 num_tokens=1",
        "dtype=bfloat16 in_features=3000 out_features=22 rms_norm=True silu_mul=True max_rows=1 "
        "num_tokens=1",
        "dtype=float16 in_features=5003 out_features=22 bias=True rms_norm=True silu_mul=True "
        "max_rows=1 num_tokens=1",
        "dtype=float32 in_features=6000 out_features=19 add=True max_rows=1 num_tokens=1",
    ],
    "attention_decode": [
        f"dtype=bfloat16 {_SPLIT}",
        f"dtype=bfloat16 {_SPLIT} batch_invariant=True",
        f"dtype=float32 {_SPLIT}",
        f"dtype=float32 {_SPLIT} batch_invariant=True",
    ],
    "attention_prefill": [f"dtype={dtype} {_CHUNKS}" for dtype in ("float16", "float32")],
}


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=[pytest.mark.slow] if op in _SLOW else []) for op in (*OPS, "engine")],
)
def test_the_kernels_pass_the_suite(op):
    results = check_backend(PycudaOnCpu(CpuGpu(checked=True)), ops=[op])
    assert not any(result.failed for result in results), format_results(results)


@pytest.mark.parametrize("op", _LARGER)
def test_the_kernels_pass_larger_cases(op):
    backend = PycudaOnCpu(CpuGpu(checked=True, num_sms=12, seed=2))
    checks = ["output_matches_oracle"] if "attention" in op else None  # the others take long
    results = check_backend(backend, ops=[op], checks=checks, cases=_LARGER[op])
    assert not any(result.failed for result in results), format_results(results)
    run = {result.case for result in results if result.outcome == "passed"}
    assert len(run) == len(_LARGER[op])


def test_a_step_of_more_sequences_than_a_block_has_threads_is_planned():
    case = f"dtype=float32 num_heads=1 num_kv_heads=1 head_dim=64 block_size=16 kv_lens={_MANY}"
    case += f" q_lens={','.join('1' * 1030)}"
    results = check_backend(
        PycudaOnCpu(CpuGpu(checked=True)),
        ops=["attention_decode"],
        checks=["output_matches_oracle"],
        cases=[case],
    )
    assert [result.outcome for result in results] == ["passed"], format_results(results)
