"""The real Llama 3 tokenizer, made from the ranks that Meta publishes on PyPI."""

from __future__ import annotations

import base64
import json
import zipfile
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}
NUM_SPECIAL = 256
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
    "\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def read_ranks(wheel: Path) -> dict[bytes, int]:
    """Return token bytes -> id from the wheel's Llama 3 `tokenizer.model`."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("llama_models/llama3/tokenizer.model").splitlines()
    pairs = (line.split() for line in lines)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def special_tokens(num_ranks: int) -> dict[str, int]:
    """Return the special tokens' ids, which follow the ranks."""
    names = (f"<|{NAMED.get(i, f'reserved_special_token_{i}')}|>" for i in range(NUM_SPECIAL))
    return {name: num_ranks + i for i, name in enumerate(names)}


def write_tokenizer(ranks: dict[bytes, int], path: Path) -> Path:
    """Write the tokenizer as a Hugging Face directory."""
    alphabet = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(alphabet[b] for b in token)

    merges = []
    for token in ranks:  # in the order of rank, which is the order of merging
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [
            (text(a), text(b)) for a, b in sorted(known, key=lambda p: max(map(ranks.get, p)))
        ]
    vocab = {text(token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    special = special_tokens(len(ranks))
    backend.add_special_tokens(list(special))
    bos = "<|begin_of_text|>"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, special[bos])]
    )
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": bos, "eos_token": "<|eot_id|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [special[f"<|{name}|>"] for name in ("end_of_text", "eom_id", "eot_id")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path
