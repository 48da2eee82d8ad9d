"""GGUF files of Hugging Face directories, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from tvr.core.config import ModelConfig


def write_gguf(
    path: Path,
    source: Path | None = None,
    *,
    format: str = "F32",
    config: ModelConfig | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write the model in directory `source` as a GGUF file.

    Args:
        path: of the file.
        source: where config.json and *.safetensors are; None: only metadata and `tensors`.
        format: that matrices are stored in; vectors are always F32.
        config: of the model, if not what `source` says.
        metadata: further keys, or other values for those the converter writes; None leaves out.
        tensors: further tensors, or others, by GGUF's names; None leaves out.
        endianess: byte order of the file.
    """
    values: dict[str, Any] = {}
    stored: dict[str, Tensor | None] = {}
    if source is not None:
        config = config or ModelConfig.from_dir(source)
        values |= model_metadata(config)
        stored |= converted_tensors(source, config)
    values |= metadata or {}
    stored |= tensors or {}
    # The writer itself adds the architecture.
    writer = GGUFWriter(path, values.pop("general.architecture", "llama"), endianess=endianess)
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    for name, tensor in stored.items():
        if tensor is not None:
            qtype = GGMLQuantizationType[format if tensor.dim() == 2 else "F32"]
            writer.add_tensor(name, encoded(tensor, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoded(tensor: Tensor, qtype: GGMLQuantizationType) -> NDArray[Any]:
    """Return the bytes or numbers that the writer takes for a tensor of that format."""
    return gguf.quantize(tensor.float().numpy(), qtype)


def decoded(tensor: Tensor, format: str) -> Tensor:
    """Return what is left of a matrix that went through a format, by the package itself."""
    qtype = GGMLQuantizationType[format]
    return torch.from_numpy(np.array(gguf.dequantize(encoded(tensor, qtype), qtype)))


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata field of the type that the converter gives such a value."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    if isinstance(value, (list, str)):
        (writer.add_array if isinstance(value, list) else writer.add_string)(key, value)
    else:
        add[type(value)](key, value)


def model_metadata(config: ModelConfig) -> dict[str, Any]:
    """Return the fields under "llama." for a model."""
    scaling = config.rope_scaling
    linear = scaling is not None and scaling.kind == "linear"
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "rope.scaling.type": "linear" if linear else None,
        "rope.scaling.factor": scaling.factor if linear else None,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        values |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    return {f"llama.{key}": value for key, value in values.items()}


def converted_tensors(source: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of a directory under GGUF's names, q and k with their rows reordered."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            for projection, num_heads in heads.items():
                if f".{projection}." in name:
                    tensor = to_pairs(tensor, num_heads)
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, name
            tensors[gguf_name] = tensor
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(config)
    return tensors


def to_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Lay the rows of a head's two halves alternately, as llama.cpp's rotation takes them."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def llama3_divisors(config: ModelConfig) -> Tensor:
    """Return llama3 scaling as the converter stores it: what to divide each frequency by."""
    scaling = config.rope_scaling
    assert scaling is not None
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    divisors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * config.rope_theta ** (i / config.head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(scaling.factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return torch.tensor(divisors)


def byte_level_metadata(
    backend: tokenizers.Tokenizer, pre: str | None, **ids: int | bool | str | None
) -> dict[str, Any]:
    """Return the fields of a byte-level BPE tokenizer; `ids` go under "tokenizer.ggml."."""
    merges = json_model(backend)["merges"]
    return {
        **_vocabulary(backend),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        **{f"tokenizer.ggml.{key}": value for key, value in ids.items()},
    }


def sentencepiece_metadata(
    pieces: Iterable[tuple[str, float, TokenType]], **ids: int | bool | str | None
) -> dict[str, Any]:
    """Return the fields of a SentencePiece vocabulary; `ids` go under "tokenizer.ggml."."""
    tokens, scores, types = zip(*pieces, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": [int(t) for t in types],
        **{f"tokenizer.ggml.{key}": value for key, value in ids.items()},
    }


def json_model(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the "model" of a tokenizer.json."""
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def _vocabulary(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    tokens = sorted(vocab, key=vocab.__getitem__)
    assert [vocab[t] for t in tokens] == list(range(len(tokens)))
    control, other = TokenType.CONTROL, TokenType.USER_DEFINED
    kinds = {i: control if t.special else other for i, t in added.items()}
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(kinds.get(i, TokenType.NORMAL)) for i in range(len(tokens))
        ],
    }
