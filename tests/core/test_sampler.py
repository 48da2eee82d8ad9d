"""The sampler: exact choices, distributions, and rows that do not see each other."""

from __future__ import annotations

import math

import pytest
import torch

from support.sampling import reset
from tvr.core.sampler import SamplerState, child_seed, sample
from tvr.core.sampler_state import RowState
from tvr.core.sampling_params import SamplingParams

VOCAB = 128


def argmax_op(logits, *, out):
    """The argmax op by its contract: lowest id of the largest, -1 for a row with a NaN."""
    best, ids = logits.max(dim=-1)
    return out.copy_(torch.where(best.isnan(), -1, ids))


def random_logits(rows, vocab=VOCAB, *, seed=0, scale=2.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)


def run(logits, requests, *, position=0, prompt=(1, 2, 3), outputs=()):
    """Sample one step of `requests`, seeded 100, 101, ... in fresh rows; return the tokens."""
    state = SamplerState(len(requests), logits.shape[1], "cpu")
    for row, params in enumerate(requests):
        reset(state, row, params, 100 + row, list(prompt), list(outputs))
    rows = torch.arange(len(requests))
    return sample(logits, state, rows, torch.full_like(rows, position), argmax_op).tolist()


def draws(params, logits, count):
    """Return `count` tokens drawn from `logits` [vocab] at rising positions of one request."""
    state = SamplerState(1, len(logits), "cpu")
    reset(state, 0, params, 7, [1])
    return torch.cat(
        [
            sample(logits[None], state, torch.tensor([0]), torch.tensor([i]), argmax_op)
            for i in range(count)
        ]
    )


GREEDY = SamplingParams(temperature=0)

# One of each way a row can be sampled, and some of their mixtures.
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.999, temperature=5.0),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0.7, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(top_k=1500, top_p=0.8),
    SamplingParams(top_k=1500),
    SamplingParams(top_k=40, top_p=0.7, min_p=0.01, repetition_penalty=1.1),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.9, min_tokens=5, stop_token_ids=[2, 77]),
]


def test_greedy_is_the_argmax_with_the_lowest_id_on_ties_in_a_mixed_batch():
    """Zero temperature was not exact, or spoilt other rows (vllm-project/vllm#5404, #22180)."""
    logits = random_logits(3)
    logits[0, :50] = -torch.inf
    logits[0, [90, 60, 120]] = 50.0
    logits[2, [4, 3]] = 50.0
    tokens = run(logits, [GREEDY, SamplingParams(temperature=0.8), GREEDY])
    assert tokens[0] == 60
    assert tokens[2] == 3
    state = SamplerState(1, VOCAB, "cpu")
    reset(state, 0, SamplingParams(temperature=0.8), 101, [])
    zero = torch.tensor([0])
    assert sample(logits[1:2], state, zero, zero, argmax_op).tolist() == tokens[1:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_candidate_is_the_argmax_however_it_is_asked_for(dtype):
    logits = random_logits(1, 4096, dtype=dtype)
    logits[0, [3000, 1234, 2000]] = 9.0  # a tie at the top
    for params in (
        GREEDY,
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-8),
        SamplingParams(top_p=1e-3),
        SamplingParams(top_p=1e-8, top_k=2000),
        SamplingParams(temperature=0, presence_penalty=1.0),
    ):
        for position in range(5):
            assert run(logits, [params], position=position, prompt=()) == [1234]


def test_top_p_of_one_keeps_every_token():
    logits = torch.zeros(8)
    assert set(draws(SamplingParams(top_p=1.0), logits, 200).tolist()) == set(range(8))


def test_top_p_keeps_the_fewest_tokens_of_that_mass():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_p, kept in ((0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3})):
        assert set(draws(SamplingParams(top_p=top_p), logits, 150).tolist()) == kept


def test_top_p_counts_the_mass_that_top_k_and_min_p_left():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    # Of the best two, the first has two thirds of the mass.
    assert set(draws(SamplingParams(top_k=2, top_p=0.6), logits, 150).tolist()) == {0}
    assert set(draws(SamplingParams(top_p=0.6), logits, 150).tolist()) == {0, 1}
    assert set(draws(SamplingParams(min_p=0.4, top_p=0.6), logits, 150).tolist()) == {0}


def test_top_p_counts_the_mass_of_tokens_far_down_the_list():
    """Of 3002 tokens the best two have 0.5 and 0.3; alone with the next thousand, 0.58 and 0.35."""
    probs = torch.full((3002,), 0.2 / 3000)
    probs[[70, 60]] = torch.tensor([0.5, 0.3])
    assert set(draws(SamplingParams(top_p=0.52), probs.log(), 100).tolist()) == {60, 70}


def test_min_p_keeps_tokens_likely_enough_beside_the_likeliest():
    logits = torch.tensor([0.4, 0.3, 0.19, 0.11]).log()
    assert set(draws(SamplingParams(min_p=0.45), logits, 150).tolist()) == {0, 1, 2}
    assert set(draws(SamplingParams(min_p=1.0), logits, 50).tolist()) == {0}


def test_top_k_past_the_vocabulary_is_off_and_mixes_with_greedy():
    logits = random_logits(6)
    asked = [SamplingParams(top_k=k, temperature=5.0) for k in (-1, 0, 128, 9_999_999, 5)]
    tokens = run(logits, [*asked, GREEDY])
    off = run(logits, [SamplingParams(temperature=5.0)] * 4 + [asked[4], GREEDY])
    assert tokens == off
    assert tokens[4] in logits[4].topk(5).indices
    assert tokens[5] == logits[5].argmax()


def test_top_k_cuts_a_tie_at_the_lower_ids():
    logits = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    assert set(draws(SamplingParams(top_k=3), logits, 200).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e6])
def test_extreme_temperature_does_not_overflow(temperature):
    logits = random_logits(1, scale=1000.0)
    logits[0, 5] = -torch.inf
    (token,) = run(logits, [SamplingParams(temperature=temperature)])
    assert token >= 0
    assert token != 5
    if temperature < 1:
        assert token == logits.argmax()


@pytest.mark.parametrize("params", MIXED)
def test_row_without_a_finite_maximum_gives_minus_one_and_harms_no_other(params):
    logits = random_logits(5, 2048)
    good = run(logits, [params] * 5)
    logits[1, 300] = torch.nan
    logits[2] = -torch.inf
    logits[3, 9] = torch.inf
    assert run(logits, [params] * 5) == [good[0], -1, -1, -1, good[4]]


def test_repetition_looks_at_prompt_and_output_and_presence_at_the_output_only():
    """The prompt was forgotten by one and used by the other (vllm-project/vllm#1577)."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 5], logits[:, 6] = 2.0, -2.0
    state = SamplerState(2, VOCAB, "cpu")
    reset(state, 0, SamplingParams(repetition_penalty=1.2), 0, [5, 6])
    reset(state, 1, SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), 0, [5, 6], [6, 6])
    changed = state.penalise(logits, torch.tensor([0, 1]))
    assert changed[0, 5].item() == pytest.approx(1.666667, abs=1e-6)
    assert changed[0, 6].item() == pytest.approx(-2.4, abs=1e-6)
    assert changed[1, 5] == 2.0  # only in the prompt
    reset(state, 0, SamplingParams(repetition_penalty=1.25), 0, [1], [6])
    assert state.penalise(logits[:1], torch.tensor([0]))[0, 5:7].tolist() == [2.0, -2.5]
    assert changed[1, 6] == -2.0 - 1.0 - 2 * 0.5
    assert changed[:, 7:].eq(0).all()


def test_a_token_is_penalised_at_the_very_next_step():
    """The newest token was missed (vllm-project/vllm-ascend#7769)."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 4]] = torch.tensor([3.0, 2.0])
    state = SamplerState(1, VOCAB, "cpu")
    reset(state, 0, SamplingParams(temperature=0, presence_penalty=2.0), 0, [9, 4])
    row = torch.tensor([0])
    tokens = [sample(logits, state, row, torch.tensor([i]), argmax_op).item() for i in range(4)]
    assert tokens == [9, 4, 9, 9]  # 3 beats 2, then 2 beats 1, then 1 beats 0 for good


def test_penalty_does_not_depend_on_the_order_of_requests():
    """vllm-project/vllm#5639: a batch-mate's penalty was used."""
    heavy = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=2.0)
    logits = random_logits(1).expand(2, VOCAB)
    texts = {}
    for order in ([heavy, GREEDY], [GREEDY, heavy]):
        state = SamplerState(2, VOCAB, "cpu")
        for row, params in enumerate(order):
            reset(state, row, params, 0, [1])
        rows = torch.arange(2)
        steps = [sample(logits, state, rows, rows * 0 + i, argmax_op) for i in range(6)]
        for params, tokens in zip(order, torch.stack(steps, dim=1).tolist(), strict=True):
            texts.setdefault(params, []).append(tokens)
    assert texts[heavy][0] == texts[heavy][1]
    assert texts[GREEDY][0] == texts[GREEDY][1] == [logits[0].argmax()] * 6
    assert texts[heavy][0] != texts[GREEDY][0]


def test_invalid_token_is_not_counted():
    state = SamplerState(1, VOCAB, "cpu")
    reset(state, 0, SamplingParams(presence_penalty=1.0), 0, [1])
    row = torch.tensor([0])
    sample(torch.full((1, VOCAB), torch.nan), state, row, row, argmax_op)
    assert (state.tables.counts >> 1).sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batch_equals_each_row_alone_in_any_order(dtype):
    """Bit for bit, over steps, with penalties growing."""
    logits = random_logits(len(MIXED), 2048, dtype=dtype)

    def texts(order):
        state = SamplerState(len(MIXED), 2048, "cpu")
        for row in order:
            reset(state, row, MIXED[row], 100 + row, [1, 2, 3], [5])
        rows = torch.tensor(order)
        steps = [sample(logits[rows], state, rows, rows * 0 + i, argmax_op) for i in range(4)]
        return dict(zip(order, torch.stack(steps, dim=1).tolist(), strict=True))

    alone = {}
    for row in range(len(MIXED)):
        alone |= texts([row])
    assert texts(list(range(len(MIXED)))) == alone
    shuffled = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(3)).tolist()
    assert texts(shuffled) == alone


@pytest.mark.parametrize("params", MIXED)
def test_request_resumed_in_another_row_goes_on_as_if_never_preempted(params):
    logits = random_logits(8, 2048, seed=5)

    def step(state, row, position):
        rows, positions = torch.tensor([row]), torch.tensor([position])
        return sample(logits[position : position + 1], state, rows, positions, argmax_op).item()

    state = SamplerState(2, 2048, "cpu")
    reset(state, 0, params, 42, [1, 2])
    unbroken = [step(state, 0, i) for i in range(8)]

    reset(state, 1, SamplingParams(repetition_penalty=3.0), 1, [9] * 20, [9, 10])
    reset(state, 1, params, 42, [1, 2], unbroken[:4])
    assert [step(state, 1, i) for i in range(4, 8)] == unbroken[4:]


def test_stop_tokens_wait_for_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 77, 8]] = torch.tensor([9.0, 8.0, 7.0])

    def token(position, **fields):
        params = SamplingParams(temperature=0, stop_token_ids=[77], **fields)
        state = SamplerState(1, VOCAB, "cpu", eos_token_ids={2, VOCAB})
        reset(state, 0, params, 0, [1])
        row = torch.tensor([0])
        return sample(logits, state, row, torch.tensor([position]), argmax_op).item()

    assert token(2, min_tokens=3) == 8
    assert token(3, min_tokens=3) == 2
    assert token(2, min_tokens=3, ignore_eos=True) == 2
    assert logits[0, 2] == 9.0  # the caller's logits are left alone


def test_nucleus_past_the_first_look_is_the_same_as_a_full_sort():
    """A flat distribution has a nucleus of thousands, among rows whose nucleus is small."""
    logits = random_logits(3, 5000, scale=0.1)
    logits[1] = random_logits(1, 5000, seed=9, scale=6.0)[0]
    tokens = run(logits, [SamplingParams(top_p=0.5)] * 3)
    # A top_k of one less than the vocabulary takes the full sort at once.
    wide = run(logits, [SamplingParams(top_p=0.5, top_k=4999)] * 3)
    assert tokens == wide
    for token, row in zip(tokens, logits, strict=True):
        probs = row.softmax(dim=-1)
        assert probs[probs > probs[token]].sum() < 0.5


def chi_square(tokens, probs):
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), 12),
        (SamplingParams(temperature=0.7), 12),
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_k=5, temperature=1.8), 5),
        (SamplingParams(top_p=0.999999), 12),
    ],
)
def test_draws_follow_the_softmax(params, kept):
    """Chi-square against the exact probabilities, below its 0.1% point."""
    logits = random_logits(1, 12, seed=1, scale=1.0)[0]
    state = SamplerState(4000, 12, "cpu")
    for row in range(4000):  # one request at 4000 positions, side by side
        reset(state, row, params, 2024, [1])
    rows = torch.arange(4000)
    tokens = sample(logits.expand(4000, 12), state, rows, rows, argmax_op)

    order = logits.argsort(descending=True)[:kept]
    probs = (logits[order] / params.temperature).softmax(dim=-1)
    rank = torch.full((12,), -1)
    rank[order] = torch.arange(kept)
    assert (rank[tokens] >= 0).all()
    freedom = kept - 1
    # Wilson-Hilferty's approximation of the 0.1% point.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square(rank[tokens], probs) < limit


def test_seeds_and_positions_give_other_draws_and_the_same_ones_the_same():
    logits = torch.zeros(1000)
    params = SamplingParams()
    first = draws(params, logits, 20)
    assert torch.equal(first, draws(params, logits, 20))
    assert len(first.unique()) > 15
    state = SamplerState(1, 1000, "cpu")
    reset(state, 0, params, 8, [1])
    zero = torch.tensor([0])
    assert sample(logits[None], state, zero, zero, argmax_op).item() != first[0]


def test_child_seeds_differ_and_the_first_is_the_requests_own():
    assert child_seed(123, 0) == 123
    assert child_seed(-1, 0) == -1
    seeds = {child_seed(seed, i) for seed in (0, 1, 2, -1, 2**63 - 1) for i in range(100)}
    assert len(seeds) == 500
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    # SplitMix64's published first output for the state 0.
    assert child_seed(0, 1) % 2**64 == 0xE220A8397B1DCDAF


def test_counts_are_those_of_the_output_and_the_prompt_is_one_bit():
    state = SamplerState(4, VOCAB, "cpu")
    reset(state, 1, SamplingParams(presence_penalty=0.1), 0, [1, 1, 4], [4, 4])
    counts = state.tables.counts[1]
    assert counts.nonzero().flatten().tolist() == [1, 4]
    assert (counts[1], counts[4]) == (1, 2 * 2 + 1)


def test_counts_stop_where_they_no_longer_fit():
    params = SamplingParams(presence_penalty=1.0, temperature=0)
    state = SamplerState(1, VOCAB, "cpu")
    reset(state, 0, params, 0, [3], [3] * 40_000)
    assert state.tables.counts[0, 3] == 2**15 - 1
    logits, row = torch.zeros(1, VOCAB), torch.tensor([0])
    logits[0, 3] = 9.0
    assert sample(logits, state, row, row, argmax_op).tolist() == [3]
    assert state.tables.counts[0, 3] == 2**15 - 1


def test_rows_may_be_given_to_many_requests_at_once():
    params = [
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(temperature=0, logit_bias={3: 1.0}),
    ]
    state = SamplerState(3, VOCAB, "cpu")
    state.reset(
        [
            RowState(row=2 - i, params=p, seed=-(2**63) + i, prompt_token_ids=[1] * (i + 5))
            for i, p in enumerate(params)
        ]
    )
    assert state.tables.temperature.tolist() == [0.0, 0.0, 0.5, 0.0]
    assert state.tables.seeds.tolist() == [0, -(2**63) + 1, -(2**63), 0]
    assert state.prompt_lens.tolist() == [0, 6, 5, 0]
    assert not state.is_greedy([2])
    assert state.is_usual([2])
    assert not state.is_usual([1])


def test_row_given_to_another_request_forgets_the_last_ones_tokens():
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    state = SamplerState(1, VOCAB, "cpu")
    reset(state, 0, params, 0, [5], [6, 6])
    reset(state, 0, params, 0, [1], [2])
    counts = state.tables.counts[0]
    assert (counts & 1).nonzero().flatten().tolist() == [1]
    assert (counts >> 1).nonzero().flatten().tolist() == [2]
