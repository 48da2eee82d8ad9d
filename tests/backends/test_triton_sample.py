"""The Triton backend's `sample` on ways that random rows seldom take, in the interpreter.

Kernels are made for the interpreter when they are imported, so each test is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

#: Made before the kernels run. Tiles are small, so that a row has many, more than one a program.
COMMON = """
from unittest.mock import patch
import torch
from triton.language import constexpr
from tvr.backends.torch_ref import sample as reference
from tvr.backends.triton import configs, sample_bracket, sample_choice, sample_kernels
from tvr.backends.triton.launch import Config, open_gpu
from tvr.backends.triton.sample import bind_sample
from tvr.conformance.row_tables import ASKED, Asked, as_run_takes_them, sample_args
from tvr.contract import Bounds, SampleSpec

def bind(vocab, rows, tile=64, wide=2):
    table = {
        configs.key("sample_best", 0, {"dtype": "float32"}): Config(blocks={"BLOCK": 2 * tile}),
        configs.key("sample_race", 0, {}): Config(blocks={"BLOCK": tile}),
        configs.key("sample_choice", 0, {}): Config(blocks={"WIDE": wide}),
    }
    with patch.object(configs, "shipped", lambda: table):
        op = bind_sample(SampleSpec(dtype="float32", vocab_size=vocab), open_gpu("cpu"))
    bounds = Bounds(max_num_seqs=rows, max_num_tokens=rows, max_seq_len=1, max_q_len=1)
    op.attach(torch.full((op.workspace_bytes(bounds),), 173, dtype=torch.uint8))
    return op.run

def agree(logits, asked=ASKED, seed=0, **config):
    rows, vocab = logits.shape
    runs = bind(vocab, rows, **config), reference.bind_sample().run
    spec = SampleSpec(dtype="float32", vocab_size=vocab)
    calls = [sample_args(spec, logits, torch.Generator().manual_seed(seed), asked) for _ in runs]
    for run, call in zip(runs, calls, strict=True):
        run(**as_run_takes_them(call))
    for name in ("out", "last_token", "counts"):
        assert torch.equal(calls[0][name], calls[1][name]), (name, calls[0][name], calls[1][name])
    return calls[0]["out"]

generator = torch.Generator().manual_seed(7)
def normal(rows, vocab):
    return 2 * torch.randn(rows, vocab, generator=generator)
"""

WAYS = {
    "a token is found among many tiles, whatever their number of programs": """
for rows, vocab in ((1, 1000), (10, 1000), (20, 131)):
    agree(normal(rows, vocab))
""",
    "tokens that may be first in a tile are compared exactly": """
sample_kernels.CLOSE = sample_choice.CLOSE = constexpr(8.0)
agree(normal(10, 700))
agree(normal(4, 700), (Asked(),))
""",
    "fp64 sums decide where fp32 cannot tell": """
sample_bracket.UNSURE = sample_choice.UNSURE = constexpr(2.0)
nuclei = [Asked(top_p=p, top_k=k) for p in (0.05, 0.5, 0.99) for k in (None, 40)]
agree(normal(12, 700), tuple(nuclei))
""",
    "what the filters rule out is drawn again until they do not": """
flat = normal(8, 400) / 8
narrow = [Asked(top_p=0.01), Asked(top_k=2), Asked(top_k=3, top_p=0.4), Asked(top_k=300)]
agree(flat, tuple(narrow))
agree(torch.zeros(4, 400), tuple(narrow))
agree(flat[:4].round(), tuple(narrow))
""",
    "the k best end among equals, in order of ids": """
few = torch.randint(0, 3, (12, 900), generator=generator).float()
agree(few, tuple(Asked(top_k=k) for k in (1, 5, 64, 300, 899)))
""",
    "fewer tokens than top_k are left": """
logits = torch.full((6, 500), -torch.inf)
logits[:, 100:103] = normal(6, 3)
out = agree(logits, (Asked(top_k=20), Asked(top_k=20, top_p=0.9), Asked(min_p=0.5, top_k=9)))
assert ((out >= 100) & (out < 103)).all()
""",
    "all programs share the search for where the kept tokens end": """
sample_choice.last_of_best = sample_choice.mass_until = None  # for where marks do not tell
agree(normal(4, 600) / 2, (Asked(top_p=0.9), Asked(top_p=0.2)))
agree(normal(4, 600) / 2, (Asked(top_k=30),))
""",
    "core samples flat logits": """
from tvr.core.draw import Draw
from tvr.core.sampler_state import Kind

asked = [Asked(top_p=0.05), Asked(top_p=0.8), Asked(top_k=7), Asked(top_k=60, top_p=0.5)]
for logits in (normal(8, 500) / 4, normal(8, 500).round() / 2):
    g = torch.Generator().manual_seed(11)
    call = sample_args(SampleSpec(dtype="float32", vocab_size=500), logits, g, tuple(asked))
    bind(500, 8)(**as_run_takes_them(call))
    rows = call["rows"]
    draw = Draw(
        logits.amax(dim=1, keepdim=True) - logits,
        *(call[name][rows] for name in ("top_k", "top_p", "seeds")),
        call["output_positions"],
    )
    assert torch.equal(call["out"], draw.take(Kind.WIDE, 500))
""",
    "logits of any size": """
agree(1e30 * normal(10, 300))
agree(1e-30 * normal(10, 300))
agree(normal(10, 300) + 1e4)
agree(normal(2, 300), (Asked(temperature=1e-37), Asked(temperature=1e30, top_p=0.5)))
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_reference_takes_the_same_token_where(way):
    _run(COMMON + WAYS[way])


def _run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


QUOTIENTS = """
import numpy as np
import torch
import triton
import triton.language as tl
from tvr.backends.triton.sample_rows import (
    FUSES, distance_upto, inverse_of, quotient, usual_quotient,
)

@triton.jit
def kernel(gaps, heats, distances, quotients, usual, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    gap, heat = tl.load(gaps + at), tl.load(heats + at)
    tl.store(distances + at, distance_upto(gap, heat))
    tl.store(quotients + at, quotient(gap, inverse_of(heat)))
    tl.store(usual + at, usual_quotient(gap, heat, inverse_of(heat).to(tl.float32)))

SIZE = 1 << 16
g = torch.Generator().manual_seed(5)
heat = torch.exp(12 * torch.rand(SIZE, generator=g) - 6)
gap = torch.exp(120 * torch.rand(SIZE, generator=g) - 110)
heat[::3] = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.8, 1.5])[torch.arange(len(heat[::3])) % 6]
gap[::5] = (torch.rand(len(gap[::5]), generator=g) * 64).bfloat16().float()
gap[:2] = torch.tensor([0.0, 2.0**-149])
found, quotients, usual = (torch.empty(SIZE) for _ in range(3))
kernel[(1,)](gap, heat, found, quotients, usual, SIZE)
assert torch.equal(quotients, gap / heat)
in_range = gap > 2.0**-100
assert in_range.sum() > SIZE // 4
assert not FUSES.value or torch.equal(usual[in_range], (gap / heat)[in_range])
assert ((found / heat) <= gap).all()
assert (torch.nextafter(found, torch.full_like(found, torch.inf)) / heat > gap).all()
"""


def test_quotients_round_as_divisions_do_and_distances_end_where_they_turn():
    _run(QUOTIENTS)


def test_rows_are_cut_so_that_programs_come_in_full_waves():
    from tvr.backends.triton.sharing import shared

    assert shared(1, 63, 528) == (63, 1)
    assert shared(256, 63, 528) == (2, 32)
    assert shared(300, 63, 528) == (7, 9)  # in two parts each the second wave would be nearly empty
    assert shared(512, 63, 528) == (1, 63)
    for rows in range(1, 600):
        parts, tiles_of_part = shared(rows, 63, 528)
        assert 63 <= parts * tiles_of_part < 63 + tiles_of_part
