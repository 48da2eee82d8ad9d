"""What the Triton backend's kernels compute, in the interpreter, where conformance does not look.

Kernels are made for the interpreter when they are imported, so each test is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")


def run_interpreted(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_silu_mul_takes_gates_of_any_size_in_fp32():
    run_interpreted(_SILU_MUL)


def test_a_gated_product_takes_pairs_where_the_plain_one_is_best_a_row_a_program():
    """It takes over the plain product's configuration, which was tuned without pairs in mind."""
    run_interpreted(_GATED)


def test_nan_in_the_next_sequence_does_not_reach_a_chunk_behind_a_short_prefix():
    """Its first rows see less than a tile, and so does what was cached before."""
    run_interpreted(_PREFILL)


def test_rope_of_many_tokens_is_that_of_few():
    """They have tiles of their own, of several tokens each; the last is not full."""
    run_interpreted(_ROPE)


def test_shares_of_equal_sequences_cut_pairs_evenly_if_they_need_not_grow_much():
    run_interpreted(_PLAN)


def test_two_threads_do_not_disturb_each_other():
    """The interpreter has one place for the program that runs: each moved the other's."""
    run_interpreted(_THREADS)


def test_a_launch_translates_the_language_once_however_often_functions_call_others():
    """It took half of the interpreter's time, at each call again."""
    run_interpreted(_TRANSLATION)


_SILU_MUL = """
import torch
from tvr.backends.triton.activation import bind_silu_mul
from tvr.backends.triton.launch import open_gpu
from tvr.contract import SiluMulSpec
sizes = torch.tensor([90.0, 110.0, 1e5, 1e10, 1.3e10, 1e20, 1e30, 3.4e38])
gate = torch.cat((sizes, -sizes, torch.tensor([torch.inf])))
x = torch.cat((gate, torch.ones_like(gate)))[None]
op = bind_silu_mul(SiluMulSpec(dtype="float32", intermediate_size=len(gate)), open_gpu("cpu"))
out = op.run(x, out=torch.empty(1, len(gate)))
torch.testing.assert_close(out[0], torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-37)
"""

_GATED = """
from unittest.mock import patch
import torch
from tvr.backends.torch_ref.fused_linear import bind_fused_linear as reference
from tvr.backends.triton import configs
from tvr.backends.triton.fused_linear import bind_fused_linear
from tvr.backends.triton.launch import Config, open_gpu
from tvr.contract import FusedLinearSpec
spec = FusedLinearSpec(
    dtype="float32", in_features=72, out_features=10, max_rows=1, silu_mul=True
)
shape = {"dtype": "float32", "in_features": 72, "out_features": 10, "rows": 1}
table = {configs.key("linear_plain", 0, shape): Config(blocks={"BN": 1, "BK": 128})}
with patch.object(configs, "shipped", lambda: table):
    op = bind_fused_linear(spec, open_gpu("cpu"))
generator = torch.Generator().manual_seed(0)
x, weight = (torch.randn(n, 72, generator=generator) for n in (1, 10))
found, wanted = torch.empty(1, 5), torch.empty(1, 5)
op.run(x, (weight, None), out=found)
reference(spec).run(x, (weight, None), out=wanted)
torch.testing.assert_close(found, wanted)
"""

_PREFILL = """
import torch
from tvr.backends.triton.launch import open_gpu
from tvr.backends.triton.prefill import bind_attention_prefill
from tvr.contract import AttentionPrefillSpec, StepMeta
spec = AttentionPrefillSpec(
    dtype="float16", num_heads=2, num_kv_heads=1, head_dim=16, block_size=16
)
run = bind_attention_prefill(spec, open_gpu("cpu")).run
def ints(*x):
    return torch.tensor(x, dtype=torch.int32)
cached, new, others = 5, 30, 12  # tiles have 32 keys; 32 rows are 16 tokens
generator = torch.Generator().manual_seed(0)
def random(*shape):
    return torch.randn(*shape, generator=generator).half()
q, k, v = random(new + others, 2, 16), random(new + others, 1, 16), random(new + others, 1, 16)
k_cache, v_cache = random(8, 1, 16, 16), random(8, 1, 16, 16)
step = StepMeta(
    block_table=ints(0, 1, 2, 3, 4, 5).view(2, 3),
    seq_lens=ints(cached + new, others),
    cu_seqlens_q=ints(0, new, new + others),
    num_seqs=2,
    num_tokens=new + others,
    max_q_len=new,
    max_seq_len=cached + new,
    seq_lens_cpu=[cached + new, others],
)
def first_sequence():
    for x, cache in ((k, k_cache), (v, v_cache)):
        slots = cache.view(-1, 16)
        slots[cached : cached + new], slots[48 : 48 + others] = x[:new, 0], x[new:, 0]
    return run(q, k, v, k_cache, v_cache, step, scale=0.25, out=torch.empty_like(q))[:new]
clean = first_sequence()
k[new:] = v[new:] = torch.nan
assert clean.isfinite().all() and torch.equal(first_sequence(), clean)
"""

_ROPE = """
import torch
from tvr.backends.triton import rope
from tvr.backends.triton.launch import open_gpu
from tvr.contract import RopeKvWriteSpec, RopeSpec
n, heads, kv_heads, dim = 23, 3, 1, 16
rope._MANY_TOKENS = 16  # or the interpreter would take long
assert rope.tokens_class(n) == rope.MANY and rope.tokens_class(12) == rope.FEW
torch.manual_seed(0)
q, k, v = torch.randn(n, heads, dim), torch.randn(n, kv_heads, dim), torch.randn(n, kv_heads, dim)
positions, angles = torch.randint(0, 64, (n,)), torch.randn(64, dim)
slots = torch.randperm(32)[:n]
slots[::7] = -1
sizes = {"dtype": "float32", "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
spec = RopeKvWriteSpec(**sizes, block_size=16)
alone, op = (bind(of, open_gpu("cpu")) for bind, of in (
    (rope.bind_rope, RopeSpec(**sizes)), (rope.bind_rope_kv_write, spec)))
def run(parts):
    caches = torch.zeros(2, 2, kv_heads, 16, dim)
    outs = torch.empty_like(q), torch.empty_like(k)
    for part in parts:
        new = {"q_out": outs[0][part], "k_out": outs[1][part]}
        op.run(q[part], k[part], v[part], positions[part], angles, *caches, slots[part], **new)
    return caches, *outs
many = run([slice(0, n)])
for found, wanted in zip(many, run([slice(0, 12), slice(12, n)]), strict=True):
    assert torch.equal(found, wanted)
turned = alone.run(q, k, positions, angles, q_out=torch.empty_like(q), k_out=torch.empty_like(k))
assert torch.equal(turned[0], many[1]) and torch.equal(turned[1], many[2])
"""

_PLAN = """
import torch
from tvr.backends.triton.decode_plan import decode_plan_kernel
def share(lengths, num_bundles, num_programs):
    n = len(lengths)
    sizes = (n + 1, 6 * num_programs, num_programs)
    starts, leads, counters = (torch.empty(size, dtype=torch.int32) for size in sizes)
    found = torch.empty(2, dtype=torch.int32)
    decode_plan_kernel[(1,)](
        torch.tensor(lengths, dtype=torch.int32), starts, leads, found, counters,
        *(n, num_bundles, num_programs, n.bit_length(), 0, 1, 8, 32),
        TILE=1, FIXED=False, BLOCK=64, PDL=False,
    )
    assert found[1] == sum(lengths) * num_bundles
    return int(found[0])
assert share([64] * 64, 8, 264) == 128  # 124.1: two pairs
assert share([2048], 8, 264) == 64  # 62.1: a 32nd of a pair
assert share([64] * 63 + [65], 8, 264) == 125
assert share([100] * 8, 8, 64) == 100
assert share([100] * 9, 8, 64) == 113  # 200 would be too many
"""

_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
import torch
from tvr.backends.triton.activation import bind_silu_mul
from tvr.backends.triton.launch import open_gpu
from tvr.contract import SiluMulSpec

sys.setswitchinterval(1e-4)

def work(rows):
    x = torch.randn(rows, 2 * 64, generator=torch.Generator().manual_seed(rows))
    expected = torch.nn.functional.silu(x[:, :64]) * x[:, 64:]
    run = bind_silu_mul(SiluMulSpec(dtype="float32", intermediate_size=64), open_gpu("cpu")).run
    for _ in range(40):
        torch.testing.assert_close(run(x, out=torch.full((rows, 64), torch.nan)), expected)

with ThreadPoolExecutor(2) as pool:
    list(pool.map(work, (3, 11)))
"""

_TRANSLATION = """
import torch
import triton.language as tl
from triton.runtime import interpreter
from tvr.backends.triton.launch import open_gpu
from tvr.backends.triton.norm import bind_rms_norm
from tvr.contract import RmsNormSpec

translate, functions = interpreter._patch_lang, []

def recorded(function):
    functions.append(function.__name__)
    return translate(function)

interpreter._patch_lang = recorded
run = bind_rms_norm(RmsNormSpec(dtype="float32", hidden_size=64), open_gpu("cpu")).run
for launch in (1, 2):
    out = run(torch.full((9, 64), 3.0), torch.ones(64), eps=0.0, out=torch.empty(9, 64))
    torch.testing.assert_close(out, torch.ones(9, 64))
    assert len(functions) == 2 * launch, functions  # the kernel's module, and that of tl.sum
    assert tl.core.is_builtin(tl.load)
assert interpreter._patch_lang is recorded
"""
