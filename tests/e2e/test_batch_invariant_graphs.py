"""With batch_invariant a request has the bits it has alone, in any batch and any graph."""

from __future__ import annotations

import pytest

from support import graph_safe
from support.device_lengths import go_by_the_device, rerun
from support.engines import engine, greedy, prompts_of, save_shape
from support.graphed import capture_for, roomy
from tvr import SamplingParams
from tvr.core.ops import OpTable
from tvr.core.products import Linear

LENGTHS = [5, 40, 1, 33, 16, 17, 64, 3]
PARAMS = [
    greedy(9, logprobs=3) if i % 2 else SamplingParams(max_tokens=9, seed=i, logprobs=3)
    for i in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


def bits_of(outputs):
    """Tokens, and log-probabilities as they are: not one may differ."""
    answers = [output.outputs[0] for output in outputs]
    return [
        [(token, row[token].logprob) for token, row in zip(a.token_ids, a.logprobs, strict=True)]
        for a in answers
    ]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """What each request gets by itself, op by op."""
    with engine(checkpoint, backend="torch", device="cpu", batch_invariant=True) as llm:
        prompts = prompts_of(LENGTHS)
        return [
            bits_of(llm.generate([p], [params]))[0]
            for p, params in zip(prompts, PARAMS, strict=True)
        ]


def served_in_graphs(checkpoint, monkeypatch, batch):
    """Serve the requests in batches of so many, every step a graph."""
    go_by_the_device(monkeypatch)
    monkeypatch.setattr(OpTable, "lacking", lambda table, flag: {})
    settings = {"first": "torch", "batch_invariant": True}
    with roomy(checkpoint, graph_safe.backend, **settings) as llm:
        capture_for(llm, rerun)
        found, prompts = [], prompts_of(LENGTHS)
        for i in range(0, len(prompts), batch):
            some = slice(i, i + batch)
            found += bits_of(llm.generate(prompts[some], PARAMS[some]))
        assert llm.stats()["num_eager_steps"] == 0
        return found


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_a_request_has_the_bits_that_it_has_alone(checkpoint, alone, monkeypatch, batch):
    """Graphs of 1, 2, 4 and 8 decodes, filled or not, and of chunks with and without decodes."""
    assert served_in_graphs(checkpoint, monkeypatch, batch) == alone


def test_an_op_that_goes_by_the_size_of_the_graph_shows(checkpoint, alone, monkeypatch):
    call = Linear.__call__

    def sums_otherwise_for_four(self, x, *, out):
        if len(x) != 4:
            return call(self, x, out=out)
        halves = [call(self, x * mask, out=out.clone()) for mask in halves_of(x)]
        return out.copy_(halves[0] + halves[1])

    monkeypatch.setattr(Linear, "__call__", sums_otherwise_for_four)
    assert served_in_graphs(checkpoint, monkeypatch, 1) == alone
    assert served_in_graphs(checkpoint, monkeypatch, 3) != alone


def halves_of(x):
    first = x.new_zeros(x.shape[1])
    first[: len(first) // 2] = 1
    return first, 1 - first
