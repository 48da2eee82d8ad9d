"""The oracle of `top_logprobs` against what is known beforehand, and who is judged by it."""

from __future__ import annotations

import math

import pytest
import torch

from tvr.conformance import oracle
from tvr.conformance.case import parse_case
from tvr.conformance.checks_logprobs import judge_logprobs
from tvr.conformance.inputs import make_call
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.subject import Subject, device_facts
from tvr.conformance.verdict import Comparison, find_fault
from tvr.contract import TopLogprobsSpec
from tvr.errors import ConfigError

CASE = parse_case("top_logprobs", "dtype=float32 vocab_size=50 num_top=3 num_tokens=4")


def test_probabilities_that_are_known_have_their_logarithms():
    logits = torch.tensor([[0.0, math.log(2), math.log(5), math.log(2)]])
    found = oracle.top_logprobs(logits, torch.tensor([3]), 3)
    assert found.ids.tolist() == [[3, 2, 1, 3]]
    assert found.ranks.tolist() == [3]
    wanted = torch.tensor([[0.2, 0.5, 0.2, 0.2]], dtype=torch.float64).log()
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-7)  # the logits are fp32


def test_a_token_below_zero_counts_as_the_first():
    found = oracle.top_logprobs(torch.zeros(2, 4), torch.tensor([-1, 2]), 0)
    assert found.ids.tolist() == [[0], [2]]
    assert found.ranks.tolist() == [1, 3]


@pytest.fixture
def ran():
    """A call that the reference has run, with a row that means nothing, and the call before."""
    calls = [make_call(CASE, torch.device("cpu")) for _ in range(2)]
    for call in calls:
        call["logits"][1, 7] = torch.nan
    Subject.installed("torch", device_facts("cpu")).run(calls[1])
    return calls


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("ids", (2, 1), 49), ("ranks", (3,), 51), ("values", (0, 2), -1.5), ("values", (1, 0), -1.5)],
)
def test_a_wrong_element_is_named(ran, name, index, value):
    before, call = ran
    judge_logprobs(call)
    reference = {output: x.clone() for output, x in call.written.items()}

    def fault():
        return find_fault(
            Comparison(call=before, found=call.written, reference=reference, rounding="twice")
        )

    assert fault() is None
    call[name][index] = value
    with pytest.raises(CheckFailed, match=name):
        judge_logprobs(call)
    assert (fault().output, fault().index, fault().found) == (name, index, value)


def test_ids_of_a_row_that_means_nothing_may_be_any_of_the_vocabulary(ran):
    _, call = ran
    call["ids"][1], call["ranks"][1] = torch.tensor([49, 48, 47, 46]), 50
    judge_logprobs(call)
    call["ids"][1, 2] = 50
    with pytest.raises(CheckFailed, match="within 50"):
        judge_logprobs(call)


@pytest.mark.parametrize(("vocab", "num_top", "most"), [(1000, 33, 32), (5, 6, 5)])
def test_no_more_can_be_asked_for_than_there_are_tokens_or_a_backend_must_keep(
    vocab, num_top, most
):
    TopLogprobsSpec(dtype="float32", vocab_size=vocab, num_top=most)
    with pytest.raises(ConfigError, match=f"num_top is {num_top}; .* {most} at most"):
        TopLogprobsSpec(dtype="float32", vocab_size=vocab, num_top=num_top)
