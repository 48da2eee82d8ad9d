"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

from tvr.core.gguf.byte_level import build_byte_level
from tvr.core.gguf.config import token_ids
from tvr.core.gguf.file import GGUFFile
from tvr.core.gguf.sentencepiece import build_sentencepiece
from tvr.core.gguf.vocabulary import CONTROL, Vocabulary
from tvr.core.tokenizer_files import TokenizerFiles
from tvr.errors import CheckpointError, ConfigError

_MODELS = ("gpt2", "llama")
# The names templates know special tokens by -> GGUF's.
_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # spelt so in the format
    "pad_token": "padding",
}
# These end a turn whatever the metadata says: many files name only the base model's EOS, and an
# answer would never end.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")


def has_tokenizer(file: GGUFFile) -> bool:
    """Return whether `file` has a tokenizer, of whatever kind."""
    return file.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def read_tokenizer(file: GGUFFile) -> TokenizerFiles | None:
    """Return what `file` says of its tokenizer; None: it has none.

    Raises:
        ConfigError: a kind of tokenizer that is not supported.
        CheckpointError: parts that are missing or damaged.
    """
    metadata = file.metadata
    model = metadata.get("tokenizer.ggml.model")
    if not has_tokenizer(file):
        return None
    if model not in _MODELS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model {str(model)[:80]!r} is not supported; supported: "
            f"{', '.join(_MODELS)}"
        )
    vocabulary = Vocabulary.of(file)
    if model == "gpt2":
        backend, add_bos = build_byte_level(vocabulary, metadata.get("tokenizer.ggml.pre"))
    else:
        space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        backend = build_sentencepiece(vocabulary, space_prefix=bool(space_prefix))
        add_bos = True
    vocabulary.add_to(backend)
    ids = {name: token_ids(file, key) for name, key in _NAMES.items()}
    bos_id = next(iter(ids["bos_token"]), None)
    asked = metadata.get("tokenizer.ggml.add_bos_token")
    if asked is True and bos_id is None:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_bos_token is true, and tokenizer.ggml.bos_token_id "
            "names no token"
        )
    turn_ends = {vocabulary.tokens.index(t) for t in vocabulary.of_type(CONTROL) if t in _TURN_ENDS}
    return TokenizerFiles(
        backend=backend,
        special_tokens={name: vocabulary.tokens[i] for name in ids for i in ids[name]},
        extra_special_tokens=[],
        add_bos_token=asked if isinstance(asked, bool) else add_bos and bos_id is not None,
        bos_token_id=bos_id,
        eos_token_ids=frozenset(turn_ends | token_ids(file, "eos", "eot", "eom")),
        chat_templates=_chat_templates(file),
    )


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(f"{prefix}.") if key != prefix else "default": value
        for key, value in file.metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    }
    return {name: source for name, source in templates.items() if isinstance(source, str)}
