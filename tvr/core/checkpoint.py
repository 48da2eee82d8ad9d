"""The files of a checkpoint and the headers of their tensors. Standard library only.

Only headers are read here, so that everything which can be wrong with a checkpoint is found
before any memory is taken for its weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tvr.core.text_files import LFS_MAGIC, dangling, is_there, read_json
from tvr.errors import CheckpointError, ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"

#: safetensors' names of the dtypes that weights may have.
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_FOREIGN_SUFFIXES = (".bin", ".pth", ".pt", ".npz")


class TensorInfo(NamedTuple):
    """Where a tensor is and what it is; `dtype` is safetensors' name ("BF16")."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def model_dir(path: str | Path) -> Path:
    """Return `path` as a Path; raise CheckpointError if it is not a directory."""
    path = Path(path).expanduser()
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"model {path} {found}; give a local Hugging Face directory (config.json, "
            "tokenizer.json, *.safetensors) or a .gguf file"
        )
    return path


def refuse_adapter(path: Path) -> None:
    """Raise ConfigError if directory `path` holds a LoRA adapter, alone or beside full weights."""
    if not (path / ADAPTER_NAME).is_file():
        return
    weights = [f.name for f in path.glob("*.safetensors") if not f.name.startswith("adapter_")]
    if weights:
        raise ConfigError(
            f"{path} has {ADAPTER_NAME} beside {shorten(sorted(weights))}: LoRA adapters are not "
            f"supported; remove {ADAPTER_NAME} to run the full weights without the adapter"
        )
    base = read_json(path / ADAPTER_NAME).get("base_model_name_or_path")
    raise ConfigError(
        f"{path} is a LoRA adapter ({ADAPTER_NAME}) for {base or 'a model it does not name'}, and "
        "adapters are not supported; merge it into that model (peft: merge_and_unload, then "
        "save_pretrained) and give the merged directory"
    )


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the checkpoint in `path`, by name, without reading its data.

    With an index, exactly the files and tensors it names count; other *.safetensors files in the
    directory are not looked at.

    Raises:
        CheckpointError: files missing, damaged, truncated or not downloaded, or an index that
            does not fit its files.
    """
    weight_map = _read_index(path)
    if weight_map is None:
        return _read_header(_single_file(path))
    files = {name: path / name for name in sorted(set(weight_map.values()))}
    missing = [name for name, file in files.items() if not file.exists()]
    if missing:
        raise CheckpointError(
            f"{path / INDEX_NAME} names files that are not there: {', '.join(missing)}"
            f"{dangling(files[missing[0]])}; download the whole checkpoint again"
        )
    headers = {name: _read_header(file) for name, file in files.items()}
    lost = [name for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        raise CheckpointError(
            f"{path / INDEX_NAME} says that {weight_map[lost[0]]} holds {shorten(lost)}, "
            "but the file does not; the index belongs to another checkpoint"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def checkpoint_dtype(path: Path) -> str | None:
    """Return the dtype of the checkpoint's first floating-point tensor; None without files."""
    if not (path / INDEX_NAME).exists() and not list(path.glob("*.safetensors")):
        return None
    dtypes = (DTYPE_NAMES.get(info.dtype) for info in read_headers(path).values())
    return next((dtype for dtype in dtypes if dtype is not None), None)


def shorten(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list that may be long, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _read_index(path: Path) -> dict[str, str] | None:
    """Return the index's map from tensor name to file name; None if there is no index."""
    file = path / INDEX_NAME
    if not is_there(file):
        return None
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map is missing, empty or not an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{file}: {name} is mapped to {shard!r}, not to a file name")
    return weight_map


def _single_file(path: Path) -> Path:
    found = sorted(path.glob("*.safetensors"))
    if path / SINGLE_NAME in found:
        return path / SINGLE_NAME
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{path} has {len(found)} safetensors files ({shorten([f.name for f in found])}) but "
            f"neither {SINGLE_NAME} nor {INDEX_NAME}; which belong to the model is not known, "
            f"add the index"
        )
    gguf = sorted(f.name for f in path.glob("*.gguf"))
    if gguf:
        raise CheckpointError(
            f"{path} has no *.safetensors file; to load {shorten(gguf)}, give that file's path"
        )
    others = sorted(f.name for f in path.iterdir() if f.suffix in _FOREIGN_SUFFIXES)
    hint = f"; {shorten(others)} must be converted to safetensors first" if others else ""
    raise CheckpointError(f"{path} has no *.safetensors file{hint}")


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """Parse a safetensors header: 8 bytes of little-endian length, then that much JSON."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            start = f.read(len(LFS_MAGIC))
            if start == LFS_MAGIC.encode():
                raise CheckpointError(
                    f"{file} is a Git LFS pointer, not the weights; run `git lfs pull`"
                )
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{file} is truncated or not a safetensors file: it has {size} bytes, its "
                    f"header alone needs {8 + length}; download it again"
                )
            f.seek(8)
            header: dict[str, Any] = json.loads(f.read(length))
    except FileNotFoundError as e:
        raise CheckpointError(f"{file} cannot be opened{dangling(file)}") from e
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} is not a safetensors file: {e}") from e
    try:
        header.pop("__metadata__", None)
        tensors = {name: _tensor_info(file, entry) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as e:
        raise CheckpointError(f"{file} has a damaged safetensors header: {e!r}") from e
    if size != 8 + length + end:
        raise CheckpointError(
            f"{file} is truncated or damaged: its header describes {8 + length + end} bytes, the "
            f"file has {size}; download it again"
        )
    return tensors


def _tensor_info(file: Path, entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end, end - begin)):
        raise ValueError(f"shape {shape} and data_offsets {[begin, end]} must be counts")
    return TensorInfo(file, str(entry["dtype"]), tuple(shape), end - begin)
