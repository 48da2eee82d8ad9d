"""What a prompt may be, and its token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError

#: Text, token ids, or a mapping with one of "prompt" and "prompt_token_ids".
Prompt: TypeAlias = "str | list[int] | Mapping[str, Any]"


def prompt_token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[str | None, list[int]]:
    """Return the prompt's text, if it was given as text, and its token ids.

    Args:
        prompt: see `Prompt`.
        tokenizer: needed for text.
        vocab_size: of the model; ids must be below it.

    Raises:
        RequestError: not a prompt, empty, or an id the model has no embedding for.
    """
    if isinstance(prompt, Mapping):
        keys = {"prompt", "prompt_token_ids"} & prompt.keys()
        if len(keys) != 1 or len(prompt) != 1:
            raise RequestError(
                f"a prompt mapping has keys {sorted(prompt)}; give exactly one of "
                "'prompt' and 'prompt_token_ids'"
            )
        prompt = prompt[keys.pop()]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, and the checkpoint has none")
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise RequestError(
                "the prompt is empty and the tokenizer adds no BOS token; give some text"
            )
        text = prompt
    else:
        if not isinstance(prompt, (list, tuple)):
            raise RequestError(
                f"a prompt is text, a list of token ids or a mapping, not {type(prompt).__name__}"
            )
        text, token_ids = None, list(prompt)
        if not token_ids:
            raise RequestError("the prompt has no token ids; give at least one")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt token id {token_id!r} is not a whole number from 0 to {vocab_size - 1}, "
                "the model's vocabulary"
            )
    return text, token_ids
