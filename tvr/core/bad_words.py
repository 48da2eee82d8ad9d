"""The token ids of words that must not be generated."""

from __future__ import annotations

from collections.abc import Iterable

from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError


def bad_word_ids(
    tokenizer: Tokenizer, words: Iterable[str], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, with a space before it and without.

    Some tokenizers (Llama 2) put a space before every text, so the word is spelt behind a line
    break too, where there is none.

    Raises:
        RequestError: a word needs a token that the model has no logit for.
    """

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    line_break = encode("\n")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        spellings = [encode(bare), encode(f" {bare}")]
        behind = encode(f"\n{bare}")
        if behind[: len(line_break)] == line_break:
            spellings.append(behind[len(line_break) :])
        for ids in spellings:
            if max(ids, default=0) >= vocab_size:
                raise RequestError(
                    f"bad_words holds {word!r}, token {max(ids)}; "
                    f"the model's token ids are 0 to {vocab_size - 1}"
                )
            if ids:
                found[ids] = None
    return tuple(found)
