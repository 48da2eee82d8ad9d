"""Incremental detokenisation: each token's text as soon as it is whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvr.core.pieces import (
    PieceTable,
    byte_fallback_piece,
    byte_level_piece,
    decoder_steps,
    strips_first_space,
    token_of,
)

if TYPE_CHECKING:
    import tokenizers

    from tvr.core.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# Enough of the prompt to know a character cut at its end (4 bytes) and a first token's context.
_CONTEXT_TOKENS = 8
# A window holds text back for this many tokens at most: a character has at most 4 bytes.
_MAX_HELD_TOKENS = 8


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text, one at a time, at a flat cost per token.

    The texts of all `push` calls and of `flush`, joined, are `Tokenizer.decode` of the tokens.
    Half a character is held back until it is whole; bytes that can no longer become a character
    come out as U+FFFD at once, so a run of invalid bytes cannot silence a stream.

    Attributes:
        push: `push(token_id) -> str`, the text that became whole. An id past the vocabulary, or
            of a skipped special token, has none. Raises RequestError for a negative id.
        flush: `flush() -> str`, what was held back; called once, at the end.
    """

    # Bound methods of the stream that serves the tokenizer's decoder: one call a token, not two.
    __slots__ = ("flush", "push")

    push: Callable[[int], str]
    flush: Callable[[], str]

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Start behind a prompt.

        Args:
            tokenizer: whose tokens these are.
            skip_special_tokens: special tokens have no text.
            prompt_token_ids: the tokens before the first one pushed. Some decoders drop the
                space in front of a text's first word, which is right only where nothing comes
                before it. None: some text comes before; empty: none does.
        """
        stream = tokenizer.decoding.stream(skip_special_tokens, prompt_token_ids)
        self.push = stream.push
        self.flush = stream.flush


class TokenTexts(dict[int, str]):
    """The text of each token by itself, in the middle of a text, special tokens included.

    They are made when they are first looked up.
    """

    def __init__(self, decoding: Decoding) -> None:
        super().__init__()
        self._decoding = decoding

    def __missing__(self, token_id: int) -> str:
        stream = self._decoding.stream(False, None)
        text = self[token_id] = stream.push(token_id) + stream.flush()
        return text


class Decoding:
    """How a tokenizer's ids become text; shared by all its detokenizers.

    A ByteLevel decoder and the Llama-2 one work token by token, so a table of what each id adds
    serves them, about ten times faster than the library's decoder. Any other decoder is run over
    a sliding window of ids.

    Attributes:
        texts: of each token by itself.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: frozenset[str]) -> None:
        """Find out how `backend` decodes.

        Args:
            backend: the library's tokenizer.
            special_tokens: tokens without text when special tokens are skipped.
        """
        self._backend = backend
        self._special_tokens = special_tokens
        self.texts = TokenTexts(self)
        steps = decoder_steps(backend)
        self._byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        to_piece = byte_level_piece() if self._byte_level else byte_fallback_piece(steps)
        self._strips_first_space = strips_first_space(steps)
        self._tables: dict[bool, PieceTable] = {}  # by skip_special_tokens
        if to_piece is not None:
            self._tables = {
                False: PieceTable(backend, to_piece, frozenset()),
                True: PieceTable(backend, to_piece, special_tokens),
            }

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for, special tokens included."""
        if self._tables:
            piece = self._tables[False][token_id]
            return piece.encode() if isinstance(piece, str) else piece
        if token_of(self._backend, token_id) is None:
            return b""
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def stream(
        self, skip_special_tokens: bool, prompt_token_ids: Sequence[int] | None
    ) -> _ByteLevelStream | _ByteFallbackStream | _WindowStream:
        """Return a new stream; for the arguments see `IncrementalDetokenizer`."""
        stream: _ByteLevelStream | _ByteFallbackStream | _WindowStream
        if not self._tables:
            skipped = self._special_tokens if skip_special_tokens else frozenset()
            stream = _WindowStream(self._backend, skipped)
        elif self._byte_level:
            stream = _ByteLevelStream(self._tables[skip_special_tokens])
        else:
            pieces = self._tables[skip_special_tokens]
            first = self._strips_first_space and prompt_token_ids is not None
            if first and prompt_token_ids:
                first = not any(pieces[token_id] for token_id in prompt_token_ids)
            stream = _ByteFallbackStream(pieces, strip_first_space=first)
        for token_id in (prompt_token_ids or ())[-_CONTEXT_TOKENS:]:
            stream.push(token_id)
        return stream


class _ByteLevelStream:
    """The bytes of the tokens in a row, read as UTF-8."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._pending = b""  # the start of a character, still valid

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            piece = piece.encode()
        # "replace" gives one U+FFFD for each longest start of a character, as the library does.
        data = self._pending + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text


class _ByteFallbackStream:
    """Characters, with runs of single-byte tokens between them that spell rare ones.

    The library turns every byte of a run that is not valid UTF-8 into a U+FFFD, characters that
    were complete before the first invalid byte included. Here they have been output by then, and
    stay (so an answer cut inside its second emoji keeps its first); the rest of the run is equal.
    """

    __slots__ = ("_pending", "_pieces", "_spoiled", "_strip")

    def __init__(self, pieces: PieceTable, *, strip_first_space: bool) -> None:
        self._pieces = pieces
        self._pending = b""  # the start of a character, still valid
        self._spoiled = False  # inside a run that has an invalid byte
        self._strip = strip_first_space

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not piece:
                return ""
            text = self.flush() + piece if self._pending else piece
            self._spoiled = False
        elif self._spoiled:
            text = _REPLACEMENT
        else:
            data = self._pending + piece
            try:
                text, used = codecs.utf_8_decode(data, "strict", False)
                self._pending = data[used:]
            except UnicodeDecodeError:
                text = _REPLACEMENT * len(data)
                self._pending = b""
                self._spoiled = True
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        text, self._pending = _REPLACEMENT * len(self._pending), b""
        return text


class _WindowStream:
    """Any decoder: what the last tokens add to the text of those just before them."""

    __slots__ = ("_backend", "_context", "_new", "_shown", "_skipped")

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[str]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._context: list[int] = []  # tokens whose text is out
        self._new: list[int] = []  # tokens after them, text held back
        self._shown = ""  # text of the context alone

    def push(self, token_id: int) -> str:
        token = token_of(self._backend, token_id)
        # A token without text must not become the context: behind it a first word looks first.
        if token is None or token in self._skipped:
            return ""
        self._new.append(token_id)
        text = self._decode(self._context + self._new)
        if text.endswith(_REPLACEMENT) and len(self._new) < _MAX_HELD_TOKENS:
            return ""
        return self._release(text)

    def flush(self) -> str:
        return self._release(self._decode(self._context + self._new)) if self._new else ""

    def _release(self, text: str) -> str:
        fresh = text[len(self._shown) :]
        self._context, self._new = self._new, []
        self._shown = self._decode(self._context)
        return fresh

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text
