"""From tokens to text: stop strings, stop tokens, limits and special tokens, without a model."""

from __future__ import annotations

import pytest

from support.small_tokenizers import save_llama3
from tvr import SamplingParams
from tvr.core.request import Request
from tvr.core.schedule_output import SequenceUpdate
from tvr.core.tokenizer import Tokenizer

TEXT = "the quick brown fox 😀"
EOT = "<|eot_id|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(save_llama3(tmp_path_factory.mktemp("text")))


@pytest.fixture
def serve(tokenizer):
    """Return a function that gives a request tokens as the scheduler does: `serve(text, ...)`."""

    def serve(text, *, tokens=None, max_tokens=1000, end=None, **params):
        request = Request(
            "x",
            None,
            [1],
            SamplingParams(max_tokens=max_tokens, **params),
            seeds=[0],
            max_tokens=max_tokens,
            tokenizer=tokenizer,
            eos_token_ids=frozenset([tokenizer.special_token_id(EOT)]),
        )
        (completion,) = request.completions
        sequence, output = completion.sequence, completion.output
        sequence.set_limits(max_model_len=10_000, num_blocks=1000, block_size=16)
        ids = tokenizer.encode(text, add_special_tokens=False) if tokens is None else tokens
        for token in ids:
            sequence.token_ids.append(token)
            reason = sequence.ends_with(token)
            by_string = request.apply(
                completion, SequenceUpdate(sequence, token, reason, None, None)
            )
            assert by_string == (output.finished and reason is None)
            if output.finished:
                break
        if end is not None:
            request.end(*end)
        assert output.token_ids == ids[: len(output.token_ids)]
        assert request.output.finished == output.finished
        return output

    return serve


def outcome(output):
    return output.text, output.finish_reason, output.stop_reason


def test_an_eos_token_ends_the_answer_and_leaves_no_text(serve, tokenizer):
    for skip in (True, False):
        output = serve(TEXT + EOT + " more", skip_special_tokens=skip)
        assert outcome(output) == (TEXT, "stop", None)
        assert output.token_ids[-1] == tokenizer.special_token_id(EOT)


def test_an_ignored_eos_token_is_a_token_like_any_other(serve):
    text = f"the fox{EOT} sleeps"
    assert outcome(serve(text, ignore_eos=True)) == ("the fox sleeps", None, None)
    assert serve(text, ignore_eos=True, skip_special_tokens=False).text == text


def test_a_stop_token_that_was_named_is_the_reason(serve, tokenizer):
    (fox,) = tokenizer.encode(" fox", add_special_tokens=False)
    eot = tokenizer.special_token_id(EOT)
    assert outcome(serve(TEXT, stop_token_ids=[fox])) == ("the quick brown", "stop", fox)
    kept = serve(TEXT, stop_token_ids=[fox], include_stop_str_in_output=True)
    assert outcome(kept) == ("the quick brown fox", "stop", fox)
    named = serve(TEXT + EOT, stop_token_ids=[eot], ignore_eos=True)
    assert outcome(named) == (TEXT, "stop", eot)


def test_a_special_token_as_stop_string_stops_though_it_has_no_text(serve):
    """vllm-project/vllm#792."""
    text = f"the fox{EOT} sleeps"
    for skip in (True, False):
        output = serve(text, stop=EOT, ignore_eos=True, skip_special_tokens=skip)
        assert outcome(output) == ("the fox", "stop", EOT)


def test_a_stop_string_across_tokens_cuts_the_text_and_keeps_the_tokens(serve):
    for stop in ("ick bro", "n f", "q"):
        cut = TEXT[: TEXT.index(stop)]
        assert outcome(serve(TEXT, stop=[stop, "never"])) == (cut, "stop", stop)
        kept = serve(TEXT, stop=[stop, "never"], include_stop_str_in_output=True)
        assert outcome(kept) == (cut + stop, "stop", stop)


def test_a_stop_string_in_the_last_token_allowed_is_the_reason(serve, tokenizer):
    count = len(tokenizer.encode(TEXT[: TEXT.index(" 😀")], add_special_tokens=False))
    assert outcome(serve(TEXT, max_tokens=count, stop="ox")) == ("the quick brown f", "stop", "ox")


def test_what_was_held_back_comes_out_when_the_answer_ends(serve, tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    stop = "😀 never"  # all its beginnings are held back
    ends = {
        "length": {"max_tokens": len(ids)},
        "stop": {"tokens": [*ids, tokenizer.special_token_id(EOT)]},
        "abort": {"end": ("abort",)},
        "error": {"end": ("error", "out of luck")},
    }
    assert serve(TEXT, stop=stop).text == TEXT[:-1]
    for reason, how in ends.items():
        output = serve(TEXT, stop=stop, **how)
        assert outcome(output) == (TEXT, reason, None)
        assert output.error == ("out of luck" if reason == "error" else None)


def test_half_a_character_at_the_end_becomes_a_replacement_character(serve, tokenizer):
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    output = serve("", tokens=ids[:1], max_tokens=1)
    assert outcome(output) == ("\N{REPLACEMENT CHARACTER}", "length", None)


def test_no_stop_counts_before_min_tokens(serve, tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    (fox,) = tokenizer.encode(" fox", add_special_tokens=False)
    place = ids.index(fox) + 1
    twice = [*ids, *ids]
    for stops in ({"stop": "fox"}, {"stop_token_ids": [fox]}):
        early = serve(TEXT, min_tokens=place, **stops)
        late = serve(TEXT, tokens=twice, min_tokens=place + 1, **stops)
        assert (len(early.token_ids), early.finish_reason) == (place, "stop")
        assert (len(late.token_ids), late.finish_reason) == (len(ids) + place, "stop")
        assert late.text.rstrip() == TEXT + "the quick brown"


def test_ids_without_a_token_have_no_text(serve, tokenizer):
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    output = serve("", tokens=[tokenizer.vocab_size + 5, *ids, tokenizer.vocab_size])
    assert output.text == "the fox"
    assert len(output.token_ids) == len(ids) + 2
