"""The spellings of bad words, by kind of tokenizer."""

from __future__ import annotations

import pytest

from support.small_tokenizers import save_chatml, save_llama2, save_llama3
from tvr.core.bad_words import bad_word_ids
from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError

VOCAB = 1 << 20


@pytest.mark.parametrize("save", [save_chatml, save_llama2, save_llama3])
@pytest.mark.parametrize("before", ["the ", "the\n", "so\n\n", " ", ""])
@pytest.mark.parametrize("word", ["the", " the", "the sea"])
def test_a_word_is_found_behind_a_space_and_a_line_break(tmp_path, save, before, word):
    """With a space put before every text, a word at a line's beginning once went unseen."""
    tokenizer = Tokenizer.from_dir(save(tmp_path))
    bare = word.lstrip()
    ids = tuple(tokenizer.encode(before + bare, add_special_tokens=False))
    found = bad_word_ids(tokenizer, [word], VOCAB)
    assert any(ids[-len(spelling) :] == spelling for spelling in found)
    for spelling in found:
        assert tokenizer.decode(spelling).strip() == bare


def test_a_spelling_that_needs_a_token_the_model_lacks_is_refused(tmp_path):
    with pytest.raises(RequestError, match="bad_words holds 'the'"):
        bad_word_ids(Tokenizer.from_dir(save_llama2(tmp_path)), ["the"], 100)
