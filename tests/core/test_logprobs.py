"""Log-probabilities on their way: from one piece of memory to dicts that are made when read."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

from tvr.core.logprobs import LogprobSeries, LogprobTensors
from tvr.core.outputs import CompletionOutput, Logprob

TEXTS = {1: "a", 2: "b", 3: "c"}
FIRST = {2: Logprob(-0.75, 2, "b"), 3: Logprob(-0.5, 1, "c")}
SECOND = {3: Logprob(-0.25, 1, "c")}


def tensors(ids, values, ranks):
    found = LogprobTensors.empty(len(ids), len(ids[0]) - 1, torch.device("cpu"))
    for tensor, given in ((found.ids, ids), (found.values, values), (found.ranks, ranks)):
        tensor.copy_(torch.tensor(given))
    return found


def rows():
    """Those of FIRST and SECOND; the second token is the likeliest itself."""
    ids, values = [[2, 3, 1], [3, 3, 2]], [[-0.75, -0.5, -1.0], [-0.25, -0.25, -2.0]]
    return tensors(ids, values, [2, 1]).on_host([1, 1])


@pytest.mark.parametrize(("num_rows", "num_top"), [(1, 0), (3, 5), (2, 20), (4, 2)])
def test_rows_come_to_the_host_as_they_were_written(num_rows, num_top):
    width = 1 + num_top
    ids = [[row * width + i for i in range(width)] for row in range(num_rows)]
    values = [[-0.5 * i for i in row] for row in ids]
    ranks = [100 + row for row in range(num_rows)]
    found = tensors(ids, values, ranks)
    assert found.ids.shape == found.values.shape == (num_rows, width)
    raw = found.on_host([num_top] * num_rows)
    found.ids.zero_()  # a later step's, in the same memory
    named = [row.named(None) for row in raw]
    assert [list(row) for row in named] == ids
    assert [[p.logprob for p in row.values()] for row in named] == values
    assert [next(iter(row.values())).rank for row in named] == ranks


def test_each_row_is_cut_to_what_was_asked_for():
    """More than there are is what there is."""
    given = tensors([[7, 8, 9]] * 4, [[-3.0, -1.0, -2.0]] * 4, [9] * 4).on_host([0, 1, 2, 20])
    assert [list(raw.named(None)) for raw in given] == [[7], [7, 8], [7, 8, 9], [7, 8, 9]]
    assert given[2].named(None)[9] == Logprob(-2.0, 2, None)
    assert [raw.value for raw in given] == [-3.0] * 4


def test_an_outputs_list_is_made_when_it_is_read_and_grows():
    output, series = CompletionOutput(index=0), LogprobSeries(TEXTS)
    assert output.logprobs is None
    output.logprobs = series
    first, second = rows()
    series.append(first)
    found = output.logprobs
    assert found == [FIRST]
    series.append(second)
    assert found == [FIRST]
    assert output.logprobs is found
    assert found == [FIRST, SECOND]


def test_a_token_is_named_once():
    class Counted(dict):
        def __getitem__(self, token_id):
            looked_up.append(token_id)
            return TEXTS[token_id]

    looked_up = []
    series = LogprobSeries(Counted())
    for raw in rows():
        series.append(raw)
        assert series.named() is series.named()
    assert looked_up == [2, 3, 3, 3]


@pytest.mark.parametrize(
    "copied",
    [
        lambda output: pickle.loads(pickle.dumps(output)),
        copy.deepcopy,
        lambda output: CompletionOutput(**dataclasses.asdict(output)),
    ],
    ids=["pickle", "deepcopy", "asdict"],
)
def test_an_output_that_is_copied_has_plain_lists(copied):
    output, series = CompletionOutput(index=0, token_ids=[2]), LogprobSeries(TEXTS)
    output.logprobs = series
    series.append(rows()[0])
    other = copied(output)
    series.append(rows()[1])
    assert other.logprobs == [FIRST]
    assert output.logprobs == [FIRST, SECOND]
    assert "logprobs=[{2: Logprob(logprob=-0.75, rank=2, decoded_token='b')" in repr(other)
