"""Byte-level BPE (GPT-2, Llama 3, SmolLM2) from a GGUF vocabulary: `tokenizer.ggml.model` "gpt2".

How text is cut into words before merging is not in the file, only a name for it. Each known name
is mapped to what the models of that name have in their tokenizer.json; the names and, for
"default", the patterns are llama.cpp's.
"""

from __future__ import annotations

from typing import NamedTuple

import tokenizers
from tokenizers import decoders, pre_tokenizers

from tvr.core.gguf.vocabulary import Vocabulary, array
from tvr.errors import ConfigError

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Kind(NamedTuple):
    """How one kind of vocabulary is used.

    Attributes:
        patterns: regular expressions that cut the text, each the pieces left by those before it.
        whole_words: a word that is a token is that token, whatever merges would make of it.
        add_bos: prompts begin with BOS if the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3 = _Kind((_LLAMA3_WORDS,), whole_words=True, add_bos=True)
_DIGITS_APART = _Kind((r"\p{N}", _GPT2_WORDS))
KINDS = {
    "default": _Kind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Kind((_GPT2_WORDS,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "tekken": _Kind((_TEKKEN_WORDS,), whole_words=True, add_bos=True),
}


def build_byte_level(vocabulary: Vocabulary, pre: object) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer, and whether its prompts begin with BOS if the file does not say.

    Args:
        vocabulary: its tokens.
        pre: `tokenizer.ggml.pre`; None, as in old files, is "default".

    Raises:
        ConfigError: an unknown `pre`.
        CheckpointError: no merges, or ones that are damaged.
    """
    file = vocabulary.file
    kind = KINDS.get(str(pre or "default"))
    if kind is None:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre {str(pre)[:80]!r} is not supported; supported: "
            f"{', '.join(sorted(KINDS))}"
        )
    if file.metadata.get("tokenizer.ggml.add_space_prefix"):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.add_space_prefix is not supported for a byte-level "
            "vocabulary"
        )
    pairs = (merge.partition(" ") for merge in array(file, "merges", str))
    merges = [(left, right) for left, _, right in pairs]
    backend = vocabulary.bpe(merges, ignore_merges=kind.whole_words)
    cutters = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in kind.patterns
    ]
    to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cutters, to_alphabet])
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos
