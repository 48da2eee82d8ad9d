"""Given tokens through the whole engine: a logits processor says them, the text must be right."""

from __future__ import annotations

import random

import pytest
import torch

from support.engines import all_blocks_came_back, engine, greedy, save_text_model, tokens_of
from support.small_tokenizers import save_chatml
from tvr import SamplingParams
from tvr.errors import RequestError

PROMPT = "say"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"), max_position_embeddings=4096)


@pytest.fixture(scope="module", params=[0, 1], ids=["lag0", "lag1"])
def llm(checkpoint, request):
    with engine(checkpoint, max_lag=request.param, num_blocks=300, max_model_len=4096) as llm:
        yield llm


def saying(ids, **more):
    """Return parameters under which the answer is `ids`."""

    def say(output_token_ids, logits):
        forced = torch.full_like(logits, -torch.inf)
        forced[ids[len(output_token_ids)]] = 0.0
        return forced

    params = {"max_tokens": len(ids), "ignore_eos": True, "logits_processors": [say], **more}
    return SamplingParams(**params)


def ids_of(llm, text):
    return llm.tokenizer.encode(text, add_special_tokens=False)


def byte_ids(llm, data):
    """Return the tokens of single bytes, which need not make characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    char_of = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [llm.tokenizer._backend.token_to_id(char_of[b]) for b in data]


def whole_and_streamed(llm, params):
    """Return the answer, which must be the same streamed, never taking back what it showed."""
    (whole,) = llm.generate(PROMPT, params)
    shown = ""
    for output in llm.stream(PROMPT, params):
        text = output.outputs[0].text
        assert text.startswith(shown)
        shown = text
    assert shown == whole.outputs[0].text
    assert all_blocks_came_back(llm)
    return whole.outputs[0]


def test_a_character_cut_off_by_a_word_is_one_replacement_and_the_rest_is_whole(llm):
    ids = [*byte_ids(llm, b"\xe4\xb8"), *ids_of(llm, " dog and fox")]
    assert whole_and_streamed(llm, saying(ids)).text == "\ufffd dog and fox"


def test_a_run_of_invalid_bytes_is_shown_while_it_goes_on(llm):
    ids = byte_ids(llm, b"\x80" * 500)
    lengths = [len(o.outputs[0].text) for o in llm.stream(PROMPT, saying(ids))]
    assert lengths[-1] == 500
    assert lengths[100] > 90


def test_an_emoji_cut_off_by_the_limit_is_flushed_once(llm):
    ids = byte_ids(llm, "ab \N{GRINNING FACE}".encode()[:-1])
    output = whole_and_streamed(llm, saying(ids))
    assert (output.text, output.finish_reason) == ("ab \ufffd", "length")


def test_random_ids_never_end_the_engine(llm):
    rng = random.Random(0)
    runs = [[rng.randrange(512) for _ in range(250)] for _ in range(20)]
    outputs = llm.generate([PROMPT] * 20, [saying(ids) for ids in runs])
    assert tokens_of(outputs) == runs
    for output in outputs:
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_a_stop_that_never_completes_keeps_nothing_back(llm):
    ids = ids_of(llm, "the quick brown dog")
    output = whole_and_streamed(llm, saying(ids, stop=["brown fox"]))
    assert (output.text, output.finish_reason) == ("the quick brown dog", "length")


def test_a_special_token_stops_by_its_text_and_leaves_none(llm):
    end = llm.tokenizer.special_token_id("<|eot_id|>")
    ids = [*ids_of(llm, "fox"), end, *ids_of(llm, "dog")]
    output = whole_and_streamed(llm, saying(ids, stop=["<|eot_id|>"]))
    assert (output.text, output.finish_reason) == ("fox", "stop")


def test_tokens_are_counted_and_not_those_of_the_text(llm):
    """One letter a token, where the tokenizer itself would take fewer."""
    ids = byte_ids(llm, b"the quick brown fox")
    output = whole_and_streamed(llm, saying(ids))
    assert output.token_ids == ids
    assert len(ids_of(llm, output.text)) < len(ids)


def test_an_empty_prompt_is_the_bos_token_or_refused(llm, checkpoint, tmp_path):
    (output,) = llm.generate("", greedy(3))
    assert output.prompt_token_ids == [llm.tokenizer.bos_token_id]
    bare = save_text_model(tmp_path)
    save_chatml(bare)
    with engine(bare) as other:
        with pytest.raises(RequestError, match="prompt is empty"):
            other.generate("", greedy(3))
        assert len(other.generate("the fox", greedy(3))[0].outputs[0].token_ids) == 3


def test_logprobs_go_with_the_tokens_of_an_answer_that_a_stop_string_ends(llm):
    ids = ids_of(llm, "the quick brown fox and dog")
    (output,) = llm.generate(PROMPT, saying(ids, stop=["brown"], logprobs=0))
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    assert [list(d) for d in answer.logprobs] == [[t] for t in answer.token_ids]
