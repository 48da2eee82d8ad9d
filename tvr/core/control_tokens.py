"""Keeps control tokens that a user wrote apart from those that a chat template writes.

A user's text may hold the text of a control token ("<|eot_id|>"). Encoded as that token it would
end the user's turn and forge another (huggingface/transformers#29279), so it must be encoded as
the ordinary characters it is, while the template's own markers stay tokens.

Before rendering, every control token in the user's strings is put between two marks; after it,
what has no mark is the template's. A second tokenizer, whose control tokens are spelt *with* the
marks, then encodes the text in one call: spelt without, they are characters like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

# Noncharacters: Unicode sets them aside for a program's inside, no text has them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"

#: Characters; encoding as many takes some milliseconds.
_LONG_TEXT = 10_000

_T = TypeVar("_T")


class ControlTokens:
    """A set of control tokens of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
        """Take `tokens`, added tokens of `backend`, as control tokens."""
        self._backend = backend
        self._tokens = frozenset(t for t in tokens if t.strip())
        # Longest first: a token that begins with another one is taken whole, as when encoding.
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._any_token = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._token = re.compile(self._any_token)

    def mark(self, value: _T) -> _T:
        """Return `value` (strings in lists and dicts, any depth) with control tokens marked.

        Dict keys are left alone. Equal to `value` if there is no control token in it.
        """
        marked: Any = value
        if isinstance(value, str):
            marked = self._token.sub(lambda m: f"{OPEN}{m[0]}{CLOSE}", value)
        elif isinstance(value, dict):
            marked = {key: self.mark(item) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            marked = [self.mark(item) for item in value]
        result: _T = marked
        return result

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`: marked control tokens as text, the others as tokens.

        A template may cut a string and part a control token from one of its marks; one mark is
        enough. Marks that stand alone are dropped.
        """
        swapped = re.sub(
            f"{OPEN}?({self._any_token}){CLOSE}?|[{OPEN}{CLOSE}]",
            lambda m: _spelling(m[0]) if m[0] == m[1] else m[1] or "",
            text,
        )
        return encode_beside(self._respelt, swapped, add_special_tokens=False)

    @cached_property
    def _respelt(self) -> tokenizers.Tokenizer:
        """The tokenizer with its control tokens spelt with marks, under their own ids."""
        spec = json.loads(self._backend.to_str())
        spec["post_processor"] = None  # names special tokens, and is not used
        for added in spec["added_tokens"]:
            added["content"] = self._respell(added["content"])
        model = spec["model"]
        # Most models also list the control tokens in the vocabulary proper. Not respelt there,
        # they would get new ids, and characters could still be put together to them.
        if isinstance(model["vocab"], dict):
            model["vocab"] = {self._respell(token): i for token, i in model["vocab"].items()}
        else:
            model["vocab"] = [[self._respell(token), score] for token, score in model["vocab"]]
        if model.get("unk_token"):
            model["unk_token"] = self._respell(model["unk_token"])
        if "merges" in model:
            pairs = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
            model["merges"] = [p for p in pairs if self._tokens.isdisjoint([*p, "".join(p)])]
        return tokenizers.Tokenizer.from_str(json.dumps(spec))

    def _respell(self, token: str) -> str:
        return _spelling(token) if token in self._tokens else token


def encode_beside(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Return the token ids of `text`; if it is long, other threads run meanwhile.

    The library keeps Python's lock while it encodes one text, seconds for some megabytes, but not
    while it encodes a list of them.
    """
    if len(text) > _LONG_TEXT:
        (encoding,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    else:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _spelling(token: str) -> str:
    return f"{OPEN}{token}{CLOSE}"
