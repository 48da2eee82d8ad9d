"""Fill a model's weights from a GGUF file.

GGUF stores the rows of q and k so that the two channels that turn together, i and
i + head_dim / 2, lie side by side; here they go back to where the rotary op expects them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tvr.core.checkpoint import shorten
from tvr.core.config import ModelConfig
from tvr.core.gguf.config import ROPE_FREQS
from tvr.core.gguf.file import GGUFFile
from tvr.core.gguf.library import can_dequantize, dequantize
from tvr.core.weights import Progress, Weights, allocate, fill
from tvr.errors import CheckpointError

# Numbers dequantised at a time: 64 MiB in fp32, however large the tensor.
_CHUNK_LEN = 2**24


class _Place(NamedTuple):
    """Where a tensor of the file goes: the slot's name, its shape, and the heads of q and k."""

    slot: str
    shape: tuple[int, ...]
    num_heads: int | None = None


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Check that the file has the tensors that `config` asks for, and no others.

    Raises:
        CheckpointError: a tensor that is missing, misshapen, unknown or in a format that cannot
            be read.
    """
    expected: dict[str, _Place] = {}
    for name, place in _places(config):
        # At once, or a damaged layer count would list billions of layers first.
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} lacks tensor {name}{_why_missing(name)}")
        expected[name] = place
    unknown = [n for n in file.tensors if n not in expected and not _is_derived(n)]
    if unknown:
        raise CheckpointError(
            f"{file.path} holds {shorten(unknown)}, which a {config.num_layers}-layer model of "
            "llama architecture does not have"
        )
    for name, place in expected.items():
        tensor = file.tensors[name]
        if tensor.shape != place.shape:
            raise CheckpointError(
                f"{file.path}: {name} has shape {list(tensor.shape)}; the metadata asks for "
                f"{list(place.shape)}"
            )
    formats = {file.tensors[name].format: name for name in expected}
    for fmt, name in formats.items():
        if not can_dequantize(fmt):
            raise CheckpointError(
                f"{file.path}: {name} is stored in {fmt.name}, which the gguf package cannot "
                "dequantise; convert the model to another format"
            )


def load_gguf_weights(
    file: GGUFFile,
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Weights:
    """Dequantise the tensors of `file`, which `check_tensors` has passed, into weights.

    Parts of a tensor go one by one into their place, so no second copy of the model is ever in
    memory.

    Raises:
        CheckpointError: a number that is out of range in a narrower `dtype`.
        CapacityError: the device has not the memory.
    """
    weights = allocate(config, dtype, device)
    slots = dict(weights.slots(config))
    places = dict(_places(config))
    done, total = 0, sum(file.tensors[name].num_bytes for name in places)
    for name, place in places.items():
        slot = slots[place.slot]
        if place.num_heads is not None:
            slot = _in_pairs(slot, place.num_heads)
        for part, values in _parts(file, name, slot):
            fill(part, values, name, file.path)
        done += file.tensors[name].num_bytes
        if progress is not None:
            progress(done, total)
    return weights


def _in_pairs(slot: Tensor, num_heads: int) -> Tensor:
    """Return a view [num_heads, head_dim / 2, 2, ...] of q or k, in GGUF's order of rows."""
    head_dim = slot.shape[0] // num_heads
    return slot.view(num_heads, 2, head_dim // 2, *slot.shape[1:]).transpose(1, 2)


def _parts(file: GGUFFile, name: str, slot: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a slot, each with its numbers in fp32."""
    rows, fmt = file.rows(name), file.tensors[name].format
    if len(file.tensors[name].shape) == 1:
        yield slot, dequantize(rows, fmt).view(slot.shape)
        return
    # Whole heads of q and k, whole rows of the others.
    step = max(1, _CHUNK_LEN * len(slot) // slot.numel())
    edges = [*range(0, len(slot), step), len(slot)]
    rows_each = len(rows) // len(slot)
    for start, stop in pairwise(edges):
        values = dequantize(rows[start * rows_each : stop * rows_each], fmt)
        yield slot[start:stop], values.view(slot[start:stop].shape)


def _places(config: ModelConfig) -> Iterator[tuple[str, _Place]]:
    """Yield each tensor that the file must have, by GGUF's name."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    yield "token_embd.weight", _Place("model.embed_tokens.weight", (config.vocab_size, hidden))
    yield "output_norm.weight", _Place("model.norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield "output.weight", _Place("lm_head.weight", (config.vocab_size, hidden))
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    products = {
        "attn_q": _Place("self_attn.q_proj", (q_size, hidden), config.num_heads),
        "attn_k": _Place("self_attn.k_proj", (kv_size, hidden), config.num_kv_heads),
        "attn_v": _Place("self_attn.v_proj", (kv_size, hidden)),
        "attn_output": _Place("self_attn.o_proj", (hidden, q_size)),
        "ffn_gate": _Place("mlp.gate_proj", (mlp, hidden)),
        "ffn_up": _Place("mlp.up_proj", (mlp, hidden)),
        "ffn_down": _Place("mlp.down_proj", (hidden, mlp)),
    }
    for idx in range(config.num_layers):
        for name, module in norms.items():
            slot = f"model.layers.{idx}.{module}.weight"
            yield f"blk.{idx}.{name}.weight", _Place(slot, (hidden,))
        for name, (module, shape, num_heads) in products.items():
            slot = f"model.layers.{idx}.{module}"
            yield f"blk.{idx}.{name}.weight", _Place(f"{slot}.weight", shape, num_heads)
            if config.attention_bias if name.startswith("attn") else config.mlp_bias:
                yield f"blk.{idx}.{name}.bias", _Place(f"{slot}.bias", shape[:1], num_heads)


def _is_derived(name: str) -> bool:
    """Return whether a tensor is no weight: rotary settings, or a table that old files stored."""
    return name == ROPE_FREQS or name.endswith(".attn_rot_embd.weight")


def _why_missing(name: str) -> str:
    return ", although other layers or products have a bias" if name.endswith(".bias") else ""
