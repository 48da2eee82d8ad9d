from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from support import small_tokenizers as small
from tvr.core.stop import StopMatcher, check_stops, resolve_stops
from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """Return the texts given out, the flushed one last, and the stop string met."""
    out = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped is not None:
            return out, stopped
    return [*out, matcher.flush()], None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read the text a character at a time: the first moment any stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_a_stop_that_never_completes_loses_and_repeats_nothing():
    out, stopped = run(StopMatcher(["beta gamma"]), ["alpha", " beta", " ", "del", "ta"])
    assert out == ["alpha", " ", "", "beta del", "ta", ""]
    assert stopped is None


def test_a_stop_cut_off_by_the_length_limit_is_flushed_once():
    matcher = StopMatcher(["beta gamma"])
    out, _ = run(matcher, ["alpha", " beta", " gam"])
    assert "".join(out) == "alpha beta gam"
    assert matcher.flush() == ""


def test_a_stop_across_tokens_is_met_and_what_follows_is_dropped():
    out, stopped = run(StopMatcher(["STOP"]), ["go S", "T", "OP and more"])
    assert ("".join(out), stopped) == ("go ", "STOP")


def test_the_stop_string_is_output_if_asked():
    out, stopped = run(StopMatcher(["STOP"], True), ["go S", "T", "OP and more"])
    assert ("".join(out), stopped) == ("go STOP", "STOP")


def test_the_stop_complete_first_wins():
    assert run(StopMatcher(["abcd", "bc"]), ["abcd"]) == (["a"], "bc")
    assert run(StopMatcher(["c", "abc"]), ["xabc"]) == (["x"], "abc")


def test_text_that_can_be_no_stop_is_not_held_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("User: ends with r") == ("User: ends with r", None)
    assert matcher.push("line\n") == ("line", None)
    assert matcher.push("next") == ("\nnext", None)


def test_without_stops_everything_passes_at_once():
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


@seed(0)
@settings(max_examples=400, deadline=None, database=None)
@given(
    st.lists(st.text("ab ", max_size=4), max_size=12),
    st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_the_outcome_does_not_depend_on_how_text_is_cut(pieces, stops, include):
    out, stopped = run(StopMatcher(stops, include), pieces)
    assert ("".join(out), stopped) == expected("".join(pieces), stops, include)


@seed(0)
@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(st.text("ab", max_size=3), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_only_a_possible_start_of_a_stop_is_held_back(pieces, stops):
    matcher = StopMatcher(stops)
    given, out = "", ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        if stopped is not None:
            return
        given, out = given + piece, out + text
        starts = [s[:n] for s in stops for n in range(len(s))]
        assert len(given) - len(out) == max(len(s) for s in starts if given.endswith(s))


@pytest.mark.parametrize("stops", [[""], ["", "x"], "", [None], 5, ["a", 1]])
def test_a_stop_that_is_empty_or_no_string_is_refused(stops):
    with pytest.raises(RequestError) as error:
        check_stops(stops)
    assert "stop" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("stops", "found"), [(None, []), ("x", ["x"]), (["x", "y"], ["x", "y"])])
def test_none_one_and_several_stops_are_valid(stops, found):
    assert check_stops(stops) == found


def test_a_special_tokens_text_becomes_a_stop_id(tmp_path):
    tokenizer = Tokenizer.from_dir(small.save_llama3(tmp_path))
    strings, ids = resolve_stops(tokenizer, ["<|eot_id|>", "hello"])
    assert ids == {tokenizer.special_token_id("<|eot_id|>"): "<|eot_id|>"}
    assert strings == ["<|eot_id|>", "hello"]
    assert resolve_stops(tokenizer, ["<|eot_id|>"], skip_special_tokens=False)[1] == {}
