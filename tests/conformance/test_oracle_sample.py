"""The oracle of `sample` against what is known beforehand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tvr.conformance.oracle_sample import RowParams, _philox, allowed_tokens

OFF = {"max_gap": np.inf, "top_k": 9, "top_p": 1.0, "repetition": 1.0, "presence": 0.0}
UNSEEN = np.zeros(4, np.int16)


def params(**changes) -> RowParams:
    return RowParams(
        **{**OFF, "temperature": 1.0, "frequency": 0.0, "seed": 0, "position": 0} | changes
    )


def tokens(logits, counts=UNSEEN, **changes) -> set[int]:
    return allowed_tokens(np.array(logits, np.float32), np.array(counts), params(**changes))


def test_random_words_are_those_of_philox():
    """The first known answer of Random123: counter and key are zero."""
    words = [int(word[0]) for word in _philox(np.zeros(1, np.uint64), 0, 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("heat", [1.0, 2.0])
def test_draws_follow_the_softmax(heat):
    share = np.array([0.5, 0.25, 0.2, 0.05])
    found = Counter()
    for position in range(4000):
        found.update(tokens(heat * np.log(share), temperature=heat, position=position))
    assert [found[i] / 4000 for i in range(4)] == pytest.approx(share, abs=0.02)


def test_filters_leave_what_they_say():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    for changes, left in (
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.35}, {1}),
        ({"top_p": 0.75}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.4 of 0.7
        ({"max_gap": -np.log(0.45)}, {1, 2, 3}),
        ({"temperature": 0.0}, {1}),
    ):
        drawn = set()
        for position in range(200):
            drawn |= tokens(logits, position=position, **changes)
        assert drawn == left, changes


def test_either_side_is_right_where_the_nucleus_ends_on_a_rounding():
    either = [tokens([0, 0, 0, 0], top_p=0.5, position=position) for position in range(50)]
    assert {len(allowed) for allowed in either} == {1, 2}
    assert set().union(*either) == {0, 1, 2}


def test_penalties_come_before_the_choice():
    greedy = {"temperature": 0.0}
    in_prompt, in_output = [1, 0, 0, 0], [4, 0, 0, 0]
    assert tokens([2, 1.5, 0, 0], in_prompt, **greedy, repetition=1.5) == {1}
    assert tokens([2, 1.5, 0, 0], in_prompt, **greedy, presence=1.0, frequency=1.0) == {0}
    assert tokens([2, 1.5, 0, 0], in_output, **greedy, presence=1.0) == {1}
    assert tokens([2, 1.5, 0, 0], in_output, **greedy, frequency=0.2) == {0}
    assert tokens([2, 1.5, 0, 0], in_output, **greedy, frequency=0.3) == {1}
    assert tokens([-2, -2.5, -9, -9], in_output, **greedy, repetition=1.5) == {1}


@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_a_best_logit_that_is_not_finite_has_no_token(logit):
    assert tokens([0, logit, 1, 0]) == {-1}
    assert tokens([-np.inf] * 4) == {-1}
