"""Token id -> the text or bytes it stands for, for decoders that work token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from tvr.errors import RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceTable(dict[int, "str | bytes"]):
    """What each token id adds to the output; filled as ids are met.

    A `str` is whole characters. `bytes` may begin or end inside a character. An id that has no
    text (a skipped special token, or one past the tokenizer's vocabulary: models are padded to
    round sizes) gives "".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        to_piece: Callable[[str], str | bytes],
        skipped: frozenset[str],
    ) -> None:
        """Start an empty table.

        Args:
            backend: gives the token of an id.
            to_piece: what the decoder makes of a token.
            skipped: tokens that give no text.
        """
        super().__init__()
        self._backend = backend
        self._to_piece = to_piece
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        token = token_of(self._backend, token_id)
        piece = "" if token is None or token in self._skipped else self._to_piece(token)
        self[token_id] = piece
        return piece


def token_of(backend: tokenizers.Tokenizer, token_id: int) -> str | None:
    """Return the token of `token_id` as the vocabulary spells it; None: past the vocabulary.

    Raises:
        RequestError: the id is negative. Samplers mark a failed row so; it is never text.
    """
    if token_id < 0:
        raise RequestError(f"token id {token_id} has no text; ids start at 0")
    if token_id >= 2**32:  # more than the library's integers hold
        return None
    token: str | None = backend.id_to_token(token_id)
    return token


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of tokenizer.json's "decoder", outermost sequence opened."""
    if backend.decoder is None:
        return []
    spec: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return steps


def byte_level_piece() -> Callable[[str], str | bytes]:
    """Return what a ByteLevel decoder makes of a token (GPT-2, Llama 3, SmolLM2).

    Such a vocabulary writes byte b as one printable character: itself where printable in Latin-1,
    else the next free one from U+0100 on. Source: GPT-2's `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in printable)
    byte_of.update({chr(0x100 + n): b for n, b in enumerate(others)})

    def to_piece(token: str) -> str | bytes:
        try:
            data = bytes(map(byte_of.__getitem__, token))
        except KeyError:  # an added token is stored as it reads, not in this alphabet
            return token
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    return to_piece


def byte_fallback_piece(steps: list[dict[str, Any]]) -> Callable[[str], str | bytes] | None:
    """Return what a Llama-2 style decoder makes of a token; None: `steps` is another decoder.

    Such a decoder is any number of plain-text Replace, then ByteFallback and Fuse, then perhaps a
    Strip of the output's first space (see `strips_first_space`).
    """
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["Strip"]:
        if not strips_first_space(steps):
            return None
        kinds.pop()
    num_replaces = len(kinds) - 2
    if num_replaces < 0 or kinds != ["Replace"] * num_replaces + ["ByteFallback", "Fuse"]:
        return None
    replaces = [(s["pattern"].get("String"), s["content"]) for s in steps[:num_replaces]]
    if any(old is None for old, _ in replaces):  # a regular expression
        return None

    def to_piece(token: str) -> str | bytes:
        for old, new in replaces:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return token if byte is None else bytes([int(byte[1], 16)])

    return to_piece


def strips_first_space(steps: list[dict[str, Any]]) -> bool:
    """Return whether the decoder drops one space from the start of the whole text."""
    return bool(steps) and steps[-1] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}
