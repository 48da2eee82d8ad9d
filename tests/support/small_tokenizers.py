"""Small tokenizers of the kinds that Llama checkpoints have, written as a checkpoint has them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "The cat sat on the mat and the dog sat on the log.",
    "the quick brown fox jumps over the lazy dog, and then the fox sleeps",
    "hello world, hello there, how are you today? I am fine, thank you.",
    "Größe und Straße; déjà vu; 东京 and 北京 are cities; a smile 😀 helps",
]

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

CHATML_TEMPLATE = """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""

ZEPHYR_TEMPLATE = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% else %}
{{ raise_exception('Only user, system and assistant roles are supported!') }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""


def byte_level(
    special_tokens: list[str], *, bos: str | None = None, other_tokens: tuple[str, ...] = ()
) -> Tokenizer:
    """Return a byte-level BPE; `bos`: the post-processor adds it; others are not special."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in special_tokens])
    backend.add_tokens([AddedToken(t, normalized=False) for t in other_tokens])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def byte_fallback(*, legacy: bool = False, bos: str | None = None) -> Tokenizer:
    """Return a SentencePiece-like BPE with byte tokens, as Llama 2 has it.

    `legacy`: the space in front of the first word comes from the normaliser (and then follows
    every special token too), not from the pre-tokeniser.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(
        LINES[:3], trainers.BpeTrainer(vocab_size=150, show_progress=False, special_tokens=[])
    )
    model = json.loads(trained.to_str())["model"]
    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *(f"<0x{b:02X}>" for b in range(256)), *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(m) for m in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if legacy:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def word_level() -> Tokenizer:
    """Return a tokenizer whose decoder no table serves: words, joined by spaces."""
    words = ["<unk>", "<s>", "alpha", "beta", "gamma", "delta", "."]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    return backend


def save(
    path: Path,
    backend: Tokenizer,
    *,
    config: dict[str, object] | None = None,
    **files: dict[str, object],
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and `<name>.json` of `files` into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, value in {"tokenizer_config": config or {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return path


LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


def save_llama3(path: Path, *, template: str | None = LLAMA3_TEMPLATE, **config: object) -> Path:
    """Write a Llama 3 style directory: BOS by the post-processor, two EOS ids."""
    backend = byte_level(LLAMA3_SPECIAL, bos="<|begin_of_text|>")
    ends = [backend.token_to_id(t) for t in ("<|end_of_text|>", "<|eot_id|>")]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        **config,
    }
    if template is not None:
        settings["chat_template"] = template
    return save(path, backend, config=settings, generation_config={"eos_token_id": ends})


def save_chatml(path: Path) -> Path:
    """Write a SmolLM2 style directory: ChatML, no BOS added."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML_TEMPLATE,
    }
    return save(path, byte_level(special), config=settings)


def save_llama2(path: Path, *, legacy: bool = False, post_process: bool = True) -> Path:
    """Write a Llama 2 / TinyLlama style directory with a Zephyr template."""
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": False},
        "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": False},
        "unk_token": "<unk>",
        "add_bos_token": True,
        "chat_template": ZEPHYR_TEMPLATE,
    }
    backend = byte_fallback(legacy=legacy, bos="<s>" if post_process else None)
    return save(path, backend, config=settings)
