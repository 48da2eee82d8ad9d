"""The Triton backend's `top_logprobs` on ways that random rows seldom take, in the interpreter.

Kernels are made for the interpreter when they are imported, so each test is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

#: Made before the kernels run. Segments are small, so that a row has many, and a part several.
COMMON = """
from unittest.mock import patch
import torch
from tvr.backends.torch_ref import top_logprobs as reference
from tvr.backends.triton import configs
from tvr.backends.triton.launch import Config, open_gpu
from tvr.backends.triton.top_logprobs import bind_top_logprobs
from tvr.contract import Bounds, TopLogprobsSpec

def room(rows, k):
    shape = rows, 1 + k
    return {"ids": torch.full(shape, -7), "values": torch.full(shape, torch.nan),
            "ranks": torch.full((rows,), -7)}

def agree(logits, tokens, k, num_top=20, segment=16, segments=2):
    rows, vocab = logits.shape
    spec = TopLogprobsSpec(dtype="float32", vocab_size=vocab, num_top=min(num_top, vocab))
    table = {configs.key("top_logprobs", 0, {"dtype": "float32"}):
             Config(blocks={"SEGMENTS": segments, "SEGMENT": segment})}
    with patch.object(configs, "shipped", lambda: table):
        op = bind_top_logprobs(spec, open_gpu("cpu"))
    bounds = Bounds(max_num_seqs=rows, max_num_tokens=rows, max_seq_len=1, max_q_len=1)
    op.attach(torch.full((op.workspace_bytes(bounds),), 173, dtype=torch.uint8))
    found, wanted = room(rows, k), room(rows, k)
    op.run(logits, tokens, **found)
    reference.bind_top_logprobs(spec).run(logits, tokens, **wanted)
    assert torch.equal(found["ids"], wanted["ids"]), (found, wanted)
    assert torch.equal(found["ranks"], wanted["ranks"]), (found, wanted)
    torch.testing.assert_close(found["values"], wanted["values"], rtol=0, atol=2e-6)
    return found

generator = torch.Generator().manual_seed(7)
def normal(rows, vocab):
    return 2 * torch.randn(rows, vocab, generator=generator)
"""

WAYS = {
    "rows are shared by any number of programs": """
for rows, vocab in ((1, 1000), (5, 1000), (40, 131), (3, 33)):
    agree(normal(rows, vocab), torch.arange(rows), 5)
""",
    "all of the likeliest may be in one segment": """
logits = normal(4, 500)
logits[:, 64:80] += 50 + torch.arange(16) % 3
agree(logits, torch.tensor([64, 79, 80, 0]), 20)
""",
    "each of the likeliest may be in a segment of its own": """
logits = normal(2, 500)
logits[:, 7::16] += 50
logits[1, 7::16] = 50
agree(logits, torch.tensor([7, 39]), 20)
""",
    "equals are in order of their ids over segments and parts": """
for value in (0.0, -3.0):
    found = agree(torch.full((3, 200), value), torch.tensor([0, 17, 199]), 20)
    assert found["ids"][0, 1:].tolist() == list(range(20))
    assert found["ranks"].tolist() == [1, 18, 200]
""",
    "there may be fewer segments than likeliest tokens, and fewer tokens than the most": """
agree(normal(3, 20), torch.tensor([0, 3, 19]), 20)
agree(normal(3, 20), torch.tensor([0, 3, 19]), 20, segment=128)
agree(normal(2, 3), torch.tensor([0, 2]), 3)
""",
    "any number of the likeliest is given by the same op": """
for k in (0, 1, 2, 7, 19):
    agree(normal(2, 300), torch.tensor([5, -1]), k)
""",
    "what is -inf weighs nothing and comes last": """
logits = normal(2, 100)
logits[:, 16:] = -torch.inf
logits[1, 3:] = -torch.inf
assert agree(logits, torch.tensor([99, 1]), 20)["values"][0, 0] == -9999
""",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.replace(" ", "-"))
def test_logprobs_are_those_of_the_reference_where(way):
    found = subprocess.run(
        [sys.executable, "-c", COMMON + WAYS[way]],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
