"""Fill a model's weights, from a checkpoint or from a seed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tvr.core.checkpoint import DTYPE_NAMES, TensorInfo, model_dir, read_headers, shorten
from tvr.core.config import DTYPE_BYTES, ModelConfig
from tvr.core.parameters import Weights
from tvr.errors import CapacityError, CheckpointError

__all__ = ["Progress", "Weights", "dummy_weights", "load_weights"]

#: Called with the bytes read so far and the bytes there are.
Progress = Callable[[int, int], None]

# Tables that old checkpoints stored beside the weights; they follow from the config.
_DERIVED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")

# Odd, so that a tile's rows do not line up with those of the next one.
_NOISE_SIZE = 2**22 - 3


def load_weights(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Weights:
    """Read the checkpoint in directory `path` into weights of `dtype` on `device`.

    Files are memory-mapped and tensors go one by one into their place, so beside the weights no
    more than the largest tensor is ever in memory. Names, shapes and dtypes are all checked before
    any is taken.

    Raises:
        CheckpointError: a file or tensor that is missing, damaged, misshapen, unknown or, in a
            narrower `dtype`, out of range.
        CapacityError: the device has not the memory.
    """
    path = model_dir(path)
    headers = read_headers(path)
    places = _match(path, config, headers)
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name in places:
        by_file[headers[places[name]].file].append(name)
    for file in by_file:
        with _open(file):  # a file that the library refuses is found before memory is taken
            pass
    weights = allocate(config, dtype, device)
    slots = dict(weights.slots(config))
    done, total = 0, sum(headers[stored].num_bytes for stored in places.values())
    for file, names in by_file.items():
        for name in names:
            # Mapped anew for each tensor: pages of a mapping count as this process's memory until
            # it ends, and those of a whole file would be the second copy.
            with _open(file) as mapped:
                fill(slots[name], mapped.get_tensor(places[name]), places[name], file)
            done += headers[places[name]].num_bytes
            if progress is not None:
                progress(done, total)
    return weights


def dummy_weights(
    config: ModelConfig, *, dtype: str, device: torch.device | str, seed: int
) -> Weights:
    """Return random weights of a size that keeps activations near one.

    They depend on `seed` and the shapes alone: the noise is drawn on the CPU, once, and every
    tensor is tiled with it from an offset of its own, which is fast for models of any size. All are
    numbers that bfloat16 has, so that a model in one dtype can be held against itself in another;
    float16 rounds only those below 6e-5.

    Raises:
        CapacityError: the device has not the memory.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_NOISE_SIZE, generator=generator).to(device)
    weights = allocate(config, dtype, device)
    for name, slot in weights.slots(config):
        offset = int(torch.randint(_NOISE_SIZE, (), generator=generator))
        flat = slot.view(-1)  # slots are whole rows, so contiguous
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        spread = 0.1 if slot.dim() == 1 else slot.shape[1] ** -0.5
        for start in range(-offset, flat.numel(), _NOISE_SIZE):
            part = flat[max(start, 0) : start + _NOISE_SIZE]
            drawn = noise[max(-start, 0) :][: part.numel()]
            part.copy_((drawn * spread + mean).bfloat16())
    return weights


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{file} cannot be opened: {e}") from e


def allocate(config: ModelConfig, dtype: str, device: torch.device | str) -> Weights:
    """Return uninitialised weights; raise CapacityError if the device has not the memory."""
    try:
        return Weights.empty(config, dtype, device)
    # A CUDA OutOfMemoryError is a RuntimeError; on CPU the allocator raises a bare one.
    except RuntimeError as e:
        size = config.num_parameters * DTYPE_BYTES[dtype] / 2**30
        raise CapacityError(
            f"the weights take {size:.1f} GiB in {dtype}, which {device} does not have ({e})"
        ) from e


def _match(path: Path, config: ModelConfig, headers: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return, for each slot's name, the checkpoint's name of the tensor that fills it.

    Raises:
        CheckpointError: the checkpoint's tensors are not those the config asks for.
    """
    expected = {
        name: tuple(slot.shape)
        for name, slot in Weights.empty(config, "float32", "meta").slots(config)
    }
    places = {name: name for name in expected}
    ignored = {name for name in headers if _DERIVED.fullmatch(name)}
    if config.tie_word_embeddings:
        ignored.add("lm_head.weight")
        # Some writers keep only one of two tied names, and it need not be the embedding's.
        if "model.embed_tokens.weight" not in headers and "lm_head.weight" in headers:
            places["model.embed_tokens.weight"] = "lm_head.weight"

    missing = [stored for stored in places.values() if stored not in headers]
    if missing:
        raise CheckpointError(f"{path} lacks {shorten(missing)}{_why_missing(missing[0])}")
    unknown = [name for name in headers if name not in expected and name not in ignored]
    if unknown:
        info = headers[unknown[0]]
        raise CheckpointError(
            f"{info.file} holds {shorten(unknown)}, which {config.architecture} with "
            f"{config.num_layers} layers does not have{_why_unknown(unknown[0])}"
        )
    for name, stored in places.items():
        info = headers[stored]
        if info.shape != expected[name]:
            raise CheckpointError(
                f"{info.file}: {stored} has shape {list(info.shape)}; config.json asks for "
                f"{list(expected[name])}"
            )
        if info.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{info.file}: {stored} has dtype {info.dtype}; supported: "
                f"{', '.join(DTYPE_NAMES)} (quantised weights are not)"
            )
    return places


def _bias_flag(name: str) -> str | None:
    if not name.endswith(".bias"):
        return None
    return "attention_bias" if ".self_attn." in name else "mlp_bias" if ".mlp." in name else None


def _why_missing(name: str) -> str:
    if name == "lm_head.weight":
        return " and config.json has not tie_word_embeddings, so the LM head is not known"
    flag = _bias_flag(name)
    return f" although config.json has {flag} true" if flag else ""


def _why_unknown(name: str) -> str:
    flag = _bias_flag(name)
    return f"; config.json would need {flag} true" if flag else ""


def fill(slot: Tensor, tensor: Tensor, name: str, file: Path) -> None:
    """Copy `tensor` into `slot`, of the same shape.

    Raises:
        CheckpointError: values that the slot's dtype would turn into inf; names `name` and `file`.
    """
    limit = torch.finfo(slot.dtype).max
    if torch.finfo(tensor.dtype).max > limit and tensor.numel():
        low, high = (float(x) for x in torch.aminmax(tensor))
        if max(-low, high) > limit:
            raise CheckpointError(
                f"{file}: {name} holds {max(-low, high):.6g}, which {slot.dtype} (up to "
                f"{limit:.6g}) cannot; load it with dtype bfloat16 or float32"
            )
    slot.copy_(tensor)
