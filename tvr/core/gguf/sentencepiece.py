"""SentencePiece-like BPE (Llama 2, TinyLlama, Mistral): `tokenizer.ggml.model` "llama".

The file has no merges but a score for each token: of all neighbours that together are a token,
those of the best score are merged first. Written out as merges that is an ordinary BPE, and what
is in no token falls back to bytes.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, normalizers

from tvr.core.gguf.vocabulary import NORMAL, UNKNOWN, Vocabulary, array

_SPACE = "▁"


def build_sentencepiece(vocabulary: Vocabulary, *, space_prefix: bool) -> tokenizers.Tokenizer:
    """Return the tokenizer.

    Args:
        vocabulary: its tokens.
        space_prefix: a space is put before each text, and before what follows a control token.

    Raises:
        CheckpointError: no scores, or a vocabulary that makes no tokenizer.
    """
    unknown = vocabulary.of_type(UNKNOWN)
    backend = vocabulary.bpe(
        _merges(vocabulary),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = [normalizers.Prepend(_SPACE)] if space_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every pair that makes a token, best score first.

    Only normal tokens: merging characters to a control token would forge it. Among pairs that
    make the same token the longer left half goes first, as in transformers' conversion.
    """
    scores = array(vocabulary.file, "scores", float, len(vocabulary.tokens))
    ids = vocabulary.ids()
    normal = set(vocabulary.of_type(NORMAL))
    ranked = [
        (-score, -cut, ids[token], token)
        for token, score in zip(vocabulary.tokens, scores, strict=True)
        if token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(token[:-cut], token[-cut:]) for _, cut, _, token in sorted(ranked)]
