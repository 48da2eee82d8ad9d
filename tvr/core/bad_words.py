"""The token ids of words that must not be generated."""

from __future__ import annotations

from collections.abc import Iterable

from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError


def bad_word_ids(
    tokenizer: Tokenizer, words: Iterable[str], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, with a space before it and without.

    Raises:
        RequestError: a word needs a token that the model has no logit for.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if max(ids, default=0) >= vocab_size:
                raise RequestError(
                    f"bad_words holds {word!r}, token {max(ids)}; "
                    f"the model's token ids are 0 to {vocab_size - 1}"
                )
            if ids:
                found[ids] = None
    return tuple(found)
