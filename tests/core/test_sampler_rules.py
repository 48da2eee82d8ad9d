"""Allowed ids, bad words, bias and bitmasks: against a restatement in plain Python, and alone."""

from __future__ import annotations

import math
import random

import pytest
import torch

from support.sampling import reset
from tvr.core.sampler import SamplerState, sample
from tvr.core.sampling_params import SamplingParams

VOCAB = 70  # not a multiple of 32
EOS = 5
PROMPT = [1, 2, 3]
GREEDY = SamplingParams(temperature=0)


def argmax_op(logits, *, out):
    """The argmax op by its contract: lowest id of the largest, -1 for a row with a NaN."""
    best, ids = logits.max(dim=-1)
    return out.copy_(torch.where(best.isnan(), -1, ids))


def logits_of(rows, *, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * 3).to(dtype)


def state_of(requests, *, outputs=(), bad_words=()):
    state = SamplerState(len(requests), VOCAB, "cpu", eos_token_ids=[EOS])
    for row, params in enumerate(requests):
        words = bad_words[row] if bad_words else ()
        reset(state, row, params, 100 + row, PROMPT, list(outputs), words)
    return state


def run(logits, requests, *, outputs=(), bad_words=(), allowed=None):
    """Sample one step of `requests` in fresh rows; return the tokens."""
    state = state_of(requests, outputs=outputs, bad_words=bad_words)
    rows = torch.arange(len(requests))
    positions = torch.full_like(rows, len(outputs))
    return sample(logits, state, rows, positions, argmax_op, allowed=allowed).tolist()


def bitmask(*rows):
    """Return the int32 words of rows of allowed ids; None is all."""
    words = torch.zeros(len(rows), -(-VOCAB // 32), dtype=torch.int64)
    for i, ids in enumerate(rows):
        for token_id in range(VOCAB) if ids is None else ids:
            words[i, token_id // 32] |= 1 << (token_id % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def restated(logits, params, output, bad_words, allowed):
    """Return the changed logits of one row, token by token, in Python's fp64."""
    changed = []
    for token, logit in enumerate(logits.tolist()):
        banned = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        banned = banned or (allowed is not None and token not in allowed)
        for word in bad_words:
            begin = list(word[:-1])
            ends = output[len(output) - len(begin) :] if len(begin) <= len(output) else None
            banned = banned or (token == word[-1] and ends == begin)
        stops = {EOS, *(params.stop_token_ids or ())}
        banned = banned or (token in stops and len(output) < params.min_tokens)
        value = logit + (params.logit_bias or {}).get(token, 0.0)
        if token in PROMPT or token in output:
            r = params.repetition_penalty
            value = value / r if value > 0 else value * r
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        changed.append(-math.inf if banned else value)
    return changed


def assert_close(given, expected):
    """Compare to a few fp32 roundings of the largest number there is on the way, below 64."""
    atol = 2 * 64 * torch.finfo(torch.float32).eps
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(given.double(), expected, rtol=0, atol=atol)


def test_adjusted_logits_equal_the_restatement():
    rng = random.Random(0)
    for seed in range(30):
        output = [rng.randrange(8) for _ in range(rng.randrange(6))]
        requests, words, allowed = [], [], []
        for _ in range(4):
            requests.append(
                SamplingParams(
                    logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(6)}
                    if rng.random() < 0.6
                    else None,
                    allowed_token_ids=rng.sample(range(VOCAB), 40) if rng.random() < 0.5 else None,
                    min_tokens=rng.choice([0, 3]),
                    stop_token_ids=[9],
                    repetition_penalty=rng.choice([1.0, 1.3]),
                    frequency_penalty=rng.choice([0.0, 0.4]),
                )
            )
            # Few ids, so that beginnings are met; several words with the same last token.
            words.append(
                [
                    tuple(rng.randrange(8) for _ in range(rng.randrange(1, 4)))
                    for _ in range(rng.randrange(5))
                ]
            )
            allowed.append(rng.sample(range(VOCAB), 60) if rng.random() < 0.5 else None)
        logits = logits_of(4, seed=seed)
        state = state_of(requests, outputs=output, bad_words=words)
        rows = torch.arange(4)
        positions = torch.full_like(rows, len(output))
        given = state.adjust(logits, state.needs(range(4)), rows, positions, bitmask(*allowed))
        expected = [
            restated(*row)
            for row in zip(logits, requests, [output] * 4, words, allowed, strict=True)
        ]
        assert_close(given, expected)
        without = state.adjust(logits, state.needs(range(4)), rows, positions, None)
        expected = [
            restated(*row)
            for row in zip(logits, requests, [output] * 4, words, [None] * 4, strict=True)
        ]
        assert_close(without, expected)


def test_a_batch_equals_each_row_alone_and_leaves_the_logits_as_they_were():
    requests = [
        GREEDY,
        SamplingParams(logit_bias={4: 50}),
        SamplingParams(temperature=0, allowed_token_ids=[60, 61]),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5, allowed_token_ids=list(range(40))),
        SamplingParams(temperature=0, logit_bias={3: 100.0}, min_tokens=2, stop_token_ids=[3]),
    ]
    words = [(), (), (), ((7,), (1, 2)), ((2, 3),), ()]
    for dtype in (torch.float32, torch.bfloat16):
        logits = logits_of(6, dtype=dtype)
        before = logits.clone()
        together = run(logits, requests, outputs=[2], bad_words=words)
        assert torch.equal(logits, before)
        for i in range(6):
            state = SamplerState(8, VOCAB, "cpu", eos_token_ids=[EOS])
            reset(state, 6, requests[i], 100 + i, PROMPT, [2], words[i])
            token = sample(
                logits[i : i + 1], state, torch.tensor([6]), torch.tensor([1]), argmax_op
            )
            assert token.tolist() == [together[i]]
        assert together[0] == logits[0].argmax()
        assert together[2] in (60, 61)


def test_a_bitmask_holds_for_every_kind_of_row():
    requests = [
        GREEDY,
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(allowed_token_ids=[33, 69]),
    ]
    for seed in range(10):
        logits = logits_of(5, seed=seed)
        tokens = run(logits, requests, allowed=bitmask([31], [32, 64], [63], [0, 69], [69, 1]))
        assert tokens[0] == 31
        assert tokens[1] in (32, 64)
        assert tokens[2] == 63
        assert tokens[3] in (0, 69)
        assert tokens[4] == 69
        assert run(logits, requests, allowed=bitmask(*[None] * 5)) == run(logits, requests)


def test_a_row_with_nothing_left_gives_minus_one_and_harms_no_other():
    """huggingface/transformers#21435: NaN probabilities where all was masked."""
    logits = logits_of(4)
    requests = [
        SamplingParams(temperature=0, allowed_token_ids=[8]),
        GREEDY,
        SamplingParams(allowed_token_ids=[EOS], min_tokens=1),
        SamplingParams(temperature=0.5),
    ]
    tokens = run(logits, requests, bad_words=[((8,),), (), (), ()])
    assert (tokens[0], tokens[2]) == (-1, -1)
    plain = run(logits, [GREEDY, GREEDY, GREEDY, requests[3]])
    assert (tokens[1], tokens[3]) == (plain[1], plain[3])
    nothing = bitmask([], None, [], None)
    assert run(logits, [GREEDY] * 4, allowed=nothing) == [-1, plain[1], -1, int(logits[3].argmax())]


def test_min_tokens_past_any_position_harms_no_neighbour():
    """It once overflowed in the step's tensors, and every request of the step failed."""
    logits = logits_of(2)
    params = SamplingParams(temperature=0, max_tokens=None, min_tokens=10**30, stop_token_ids=[7])
    logits[0, [EOS, 7, 9]] = torch.tensor([90.0, 80.0, 70.0])
    assert run(logits, [params, GREEDY]) == [9, int(logits[1].argmax())]


def test_a_bad_word_is_seen_across_steps_without_the_host():
    """The newest token counts at the very next step; a word may end where another begins."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [6, 7, 8]] = torch.tensor([3.0, 2.0, 1.0])
    state = state_of([GREEDY], bad_words=[((6, 6), (6, 7, 6))])
    row = torch.tensor([0])
    tokens = [sample(logits, state, row, torch.tensor([i]), argmax_op).item() for i in range(6)]
    # 6 is banned behind 6, then behind 6 7.
    assert tokens == [6, 7, 7, 6, 7, 7]


def test_a_longer_bad_word_in_another_row_changes_no_other():
    """The table of last tokens grows; what it held must stay where it was."""
    state = SamplerState(2, VOCAB, "cpu")
    reset(state, 0, GREEDY, 1, PROMPT, [6], [(6, 7)])
    reset(state, 1, GREEDY, 1, PROMPT, [1, 2, 3, 4], [(1, 2, 3, 4, 7)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 7] = 1.0
    rows = torch.arange(2)
    assert sample(logits, state, rows, rows, argmax_op).tolist() == [0, 0]
    # Neither row's output ends in the beginning of its word any more.
    assert sample(logits, state, rows, rows, argmax_op).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(), ((6, 7), (0, 1, 2))),
        (SamplingParams(logit_bias={3: 2.0, 4: -1.5}, presence_penalty=0.5), ()),
        (SamplingParams(allowed_token_ids=list(range(12)), top_k=5), ((3,), (2, 2))),
    ],
)
def test_a_request_resumed_in_another_row_goes_on_as_if_never_preempted(params, words):
    logits = logits_of(20, seed=3)
    logits[:, 12:] -= 20.0  # few tokens are likely, so that words come up

    def go(state, row, tokens):
        for position in range(len(tokens), len(logits)):
            token = sample(
                logits[position : position + 1],
                state,
                torch.tensor([row]),
                torch.tensor([position]),
                argmax_op,
            )
            tokens.append(token.item())
        return tokens

    state = SamplerState(2, VOCAB, "cpu")
    reset(state, 0, params, 11, PROMPT, [], words)
    whole = go(state, 0, [])
    for cut in (1, 7, 15):
        reset(state, 1, params, 11, PROMPT, whole[:cut], words)
        assert go(state, 1, whole[:cut]) == whole


def test_a_row_given_to_another_request_forgets_the_last_ones_rules():
    logits = logits_of(1)
    state = state_of([SamplingParams(allowed_token_ids=[9], logit_bias={9: 5})], outputs=[4, 4])
    reset(state, 0, SamplingParams(temperature=0), 100, PROMPT, [], [(4, 4, int(logits.argmax()))])
    zero = torch.tensor([0])
    assert sample(logits, state, zero, zero, argmax_op).item() == logits.argmax()


def test_tables_are_made_only_when_a_row_needs_them():
    state = state_of([SamplingParams(logit_bias={3: 1.0}, min_tokens=2)])
    assert len(state.rules.allowed) == 0
    assert state.rules.last_tokens.shape == (1, 0)
    assert state_of([GREEDY]).needs([0])[0].rules is None
