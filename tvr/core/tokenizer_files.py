"""What a checkpoint directory says of its tokenizer, gathered from the files that say it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tvr.core.text_files import is_there, read_json, read_text
from tvr.errors import CheckpointError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
#: Tokenizers in forms that are not read, named in the error when there is no other.
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The facts, before they are put together.

    Attributes:
        backend: tokenizer.json, with padding and truncation off.
        special_tokens: text of the named special tokens ("bos_token", ...), those that are set.
        extra_special_tokens: further special tokens.
        add_bos_token: what tokenizer_config.json asks for; None: it does not say.
        bos_token_id: from config.json.
        eos_token_ids: from config.json and generation_config.json.
        chat_templates: jinja source by name; a model's only one is "default".
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    extra_special_tokens: list[str]
    add_bos_token: bool | None
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    chat_templates: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> TokenizerFiles:
        """Read the directory `path`.

        Raises:
            CheckpointError: no tokenizer.json, or a file that cannot be read as what it is.
        """
        backend = _read_backend(path)
        settings, tokens_map, config, generation = (
            read_json(path / name) if is_there(path / name) else {}
            for name in (
                "tokenizer_config.json",
                "special_tokens_map.json",
                "config.json",
                "generation_config.json",
            )
        )
        special_tokens: dict[str, str] = {}
        extra: list[str] = []
        for source in (tokens_map, settings):  # the later one wins
            special_tokens.update({name: text for name in _NAMED for text in _texts(source, name)})
            extra += [text for name in _LISTED for text in _texts(source, name)]
        add_bos = settings.get("add_bos_token")
        bos_ids = _ids(config, "bos_token_id")
        return cls(
            backend=backend,
            special_tokens=special_tokens,
            extra_special_tokens=extra,
            add_bos_token=add_bos if isinstance(add_bos, bool) else None,
            bos_token_id=bos_ids[0] if bos_ids else None,
            eos_token_ids=frozenset(
                _ids(config, "eos_token_id") + _ids(generation, "eos_token_id")
            ),
            chat_templates=_chat_templates(path, settings),
        )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not is_there(file):
        found = [name for name in _OTHER_FORMS if (path / name).exists()]
        there = f"only {', '.join(found)}" if found else "nor any other tokenizer"
        raise CheckpointError(
            f"{path} has no tokenizer.json ({there}); tvr reads no other form: load it with "
            "transformers' AutoTokenizer and save it there with save_pretrained"
        )
    text = read_text(file)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the library raises bare Exception for whatever it does not like
        raise CheckpointError(f"{file} is not a usable tokenizer: {e}") from e
    # Left over from training runs; they would cut long prompts or pad short ones.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _texts(settings: dict[str, Any], key: str) -> Iterator[str]:
    """Yield the token texts under `key`: a string, a serialised AddedToken, or many of these."""
    value = settings.get(key)
    if isinstance(value, dict) and "content" not in value:
        value = list(value.values())
    for item in value if isinstance(value, list) else [value]:
        text = item.get("content") if isinstance(item, dict) else item
        if isinstance(text, str) and text:
            yield text


def _ids(settings: dict[str, Any], key: str) -> list[int]:
    """Return the token ids under `key`: one, a list of them, or none."""
    value = settings.get(key)
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int and i >= 0]


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    value = settings.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {
            item["name"]: item["template"]
            for item in value
            if isinstance(item, dict) and {"name", "template"} <= item.keys()
        }
    file = path / "chat_template.jinja"
    if is_there(file):
        templates["default"] = read_text(file)
    return templates
