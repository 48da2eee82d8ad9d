"""Sampling parameters: what is taken, and how what is not is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from tvr.core.sampling_params import SamplingParams
from tvr.errors import RequestError


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, None)
    assert not params.is_greedy
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("field", "bad", "allowed"),
    [
        ("n", [0, -1, 1.0, True, None, 16385, "1"], "1 to 16384"),
        ("temperature", [-0.1, math.nan, math.inf, 1e7, True, None, "1"], "0 to 1e+06"),
        ("top_p", [0, 0.0, -1, 1.5, math.nan, -math.inf, True, None], "above 0, at most 1"),
        ("top_k", [-2, 1.5, True, None, "5"], "at least -1"),
        ("min_p", [-0.01, 1.01, math.nan, False, None], "0 to 1"),
        ("seed", [1 << 63, -(1 << 63) - 1, 1.0, True, "7"], "None"),
        ("max_tokens", [0, -1, 2.0, True, "16"], "at least 1 or None"),
        ("min_tokens", [-1, 0.0, False, None], "at least 0"),
        ("repetition_penalty", [0, -1.0, math.nan, math.inf, 1001, True], "0.001 to 1000"),
        ("presence_penalty", [-2.01, 2.01, math.nan, True, None], "-2 to 2"),
        ("frequency_penalty", [-2.01, 2.01, math.inf, "0"], "-2 to 2"),
        ("stop", ["", [""], ["", "x"], ["x", 1], [None], 5, b"x", {"x": 1}], "string"),
        ("stop_token_ids", [5, "5", [-1], [1.0], [True], ["a"], [None]], "integers|list"),
        ("allowed_token_ids", [5, "5", [-1], [1.0], [True], [None]], "integers|list"),
        ("logit_bias", [5, [3], {-1: 0.0}, {"-3": 1.0}, {3: "x"}, {3: math.nan}], "dict of token"),
        ("bad_words", ["word", [""], [" "], ["a", 1], [b"x"], 5, {"x"}], "strings that are not"),
        ("logits_processors", [len, [3], {"f": len}, "len"], "callables"),
        ("logprobs", [-1, 21, 1.0, True, "5", 9_999_999], "0 to 20 or None"),
        ("prompt_logprobs", [-1, 21, 0.0, False, "5"], "0 to 20 or None"),
        ("ignore_eos", [0, 1, None, "yes"], "True or False"),
        ("include_stop_str_in_output", [0, None], "True or False"),
        ("skip_special_tokens", [1, None], "True or False"),
    ],
)
def test_bad_value_is_refused_in_one_line_naming_field_value_and_what_is_allowed(
    field, bad, allowed
):
    for value in bad:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        message = str(caught.value)
        assert message.startswith(f"{field} is ")
        assert repr(value)[:3] in message
        assert any(part in message for part in allowed.split("|"))
        assert "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-9},
        {"top_p": 1e-8},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 9_999_999},
        {"seed": -(1 << 63)},
        {"seed": (1 << 63) - 1},
        {"max_tokens": None, "min_tokens": 10**9},
        {"max_tokens": 10**30},
        {"stop": None},
        {"stop": "x"},
        {"stop": ["x", "yy"]},
        {"stop": []},
        {"stop_token_ids": [0, 5]},
        {"repetition_penalty": 0.5},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": {}, "bad_words": [], "logits_processors": []},
        {"logit_bias": {0: -math.inf, 7: 1, "8": -(10**400)}},
        {"allowed_token_ids": {7, 9}},
        {"logits_processors": (len,)},
        {"n": 16384},
    ],
)
def test_value_at_the_edge_is_taken(fields):
    params = SamplingParams(**fields)
    assert dataclasses.replace(params, ignore_eos=True).ignore_eos


def test_long_value_is_cut_in_the_message():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["x" * 10_000, ""])
    assert len(str(caught.value)) < 200


def test_more_min_tokens_than_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 17; it must be at most max_tokens, 16"):
        SamplingParams(min_tokens=17)


def test_stop_is_one_string_or_many():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


def test_changing_the_callers_lists_later_changes_nothing():
    stop, ids = ["a"], [3]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("")
    ids.append(-1)
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (3,)


def test_stop_token_id_outside_the_vocabulary_is_refused():
    """Such an id once wrote into another request's row (vllm-project/vllm#54195, #16529)."""
    params = SamplingParams(stop_token_ids=[7, 151645])
    params.check_vocab(151646)
    with pytest.raises(RequestError, match=r"stop_token_ids holds 151645.* 0 to 128255"):
        params.check_vocab(128256)


def test_ids_of_bias_and_allowed_tokens_must_be_the_models():
    for name, value in (("logit_bias", {191222: -100}), ("allowed_token_ids", [3, 191222])):
        params = SamplingParams(**{name: value})
        params.check_vocab(191223)
        with pytest.raises(RequestError, match=rf"{name} holds 191222.* 0 to 128255"):
            params.check_vocab(128256)


def test_allowing_no_token_is_refused():
    with pytest.raises(RequestError, match=r"allowed_token_ids .* at least one token id"):
        SamplingParams(allowed_token_ids=[])


def test_bias_is_cut_to_a_hundred_and_kept_apart_from_the_callers():
    bias = {1: 1000, 2: -math.inf, 3: 0.5, np.int64(4): np.float32(2)}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 1.0
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 0.5, 4: 2.0}
    assert [type(i) for i in params.logit_bias] == [int] * 4


def test_ids_of_bias_may_be_text_as_all_keys_of_json_are():
    bias = json.loads('{"3": 5, "11": -1}')
    assert SamplingParams(logit_bias=bias).logit_bias == {3: 5.0, 11: -1.0}
    for key in ("", "x", "٣", "1.0", "9" * 5000):
        with pytest.raises(RequestError, match="logit_bias is "):
            SamplingParams(logit_bias={key: 1.0})


@pytest.mark.parametrize("field", ["temperature", "top_p", "repetition_penalty"])
def test_an_integer_too_large_for_a_float_is_refused_like_any_other(field):
    """It once raised OverflowError, which ended a whole batch."""
    with pytest.raises(RequestError, match=f"{field} is 1000"):
        SamplingParams(**{field: 10**400})


def test_numpy_scalars_become_pythons_own():
    params = SamplingParams(seed=np.int64(5), top_p=np.float32(0.5), stop_token_ids=[np.int32(3)])
    values = [params.seed, params.top_p, *params.stop_token_ids]
    assert values == [5, 0.5, 3]
    assert [type(value) for value in values] == [int, float, int]


def test_greedy_is_a_zero_temperature_or_a_single_candidate():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_import_takes_no_torch():
    code = "import sys, tvr.core.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
