"""The tokens of a GGUF file, checked, as both kinds of tokenizer are built from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from tvr.core.gguf.file import GGUFFile
from tvr.errors import CheckpointError

# GGUF's token types. The last is of the single bytes of a SentencePiece vocabulary.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens and what is said of each.

    Attributes:
        file: they are from, for messages.
        tokens: by id, as the tokenizer's own alphabet spells them.
        types: their GGUF types.
    """

    file: GGUFFile
    tokens: list[str]
    types: list[int]

    @classmethod
    def of(cls, file: GGUFFile) -> Vocabulary:
        """Read the vocabulary of `file`.

        Raises:
            CheckpointError: it is missing, contradictory or has tokens of an unknown type.
        """
        tokens = array(file, "tokens", str)
        types = [NORMAL] * len(tokens)
        if "tokenizer.ggml.token_type" in file.metadata:
            types = array(file, "token_type", int, len(tokens))
        other = sorted(set(types) - set(range(NORMAL, BYTE + 1)))
        if other:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.token_type has {other}; types are {NORMAL} to {BYTE}"
            )
        ids: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            if ids.setdefault(token, token_id) != token_id:
                raise CheckpointError(
                    f"{file.path}: tokenizer.ggml.tokens has {token!r} twice, as {ids[token]} and "
                    f"as {token_id}"
                )
        return cls(file=file, tokens=tokens, types=types)

    def ids(self) -> dict[str, int]:
        """Return the id of each token but the unused ones, which have no text."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != UNUSED
        }

    def of_type(self, *types: int) -> list[str]:
        """Return the tokens of these types, in the order of their ids."""
        return [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def bpe(self, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:  # noqa: ANN401
        """Return a BPE of these tokens; raise CheckpointError if `merges` do not fit them."""
        try:
            return tokenizers.Tokenizer(models.BPE(self.ids(), merges, **options))
        except Exception as e:  # the library raises bare Exception for whatever it does not like
            raise CheckpointError(f"{self.file.path} has no usable tokenizer: {e}") from e

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Let `backend` take control and user-defined tokens whole wherever a text has them."""
        special, other = self.of_type(CONTROL, UNKNOWN), self.of_type(USER_DEFINED)
        backend.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        backend.add_tokens([AddedToken(t, normalized=False) for t in other])


def array(file: GGUFFile, name: str, kind: type, length: int | None = None) -> list[Any]:
    """Return the array `tokenizer.ggml.<name>`.

    Raises:
        CheckpointError: it is missing, or not `length` elements of `kind`.
    """
    key = f"tokenizer.ggml.{name}"
    value = file.metadata.get(key)
    if not isinstance(value, list) or not all(type(element) is kind for element in value):
        found = "not an array of " + kind.__name__ if key in file.metadata else "missing"
        raise CheckpointError(f"{file.path}: {key} is {found}, so the tokenizer is not known")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{file.path}: {key} has {len(value)} elements, for {length} tokens")
    return value
