"""Where a model comes from: a Hugging Face directory or a GGUF file, behind one interface."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Protocol

import torch

from tvr.core.checkpoint import refuse_adapter, shorten
from tvr.core.config import ModelConfig
from tvr.core.text_files import is_there
from tvr.core.tokenizer import Tokenizer
from tvr.core.weights import Progress, Weights, load_weights
from tvr.errors import CheckpointError, ConfigError


class Checkpoint(Protocol):
    """A model on disk. Opening one reads its config and takes no memory for weights."""

    config: ModelConfig

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None: there is none."""

    def require_tokenizer(self) -> None:
        """Raise CheckpointError if there is no tokenizer; says what is there instead."""

    def load_weights(
        self, *, dtype: str, device: torch.device | str, progress: Progress | None = None
    ) -> Weights:
        """Return the weights in `dtype` on `device`; `progress` as in `tvr.core.weights`."""


def open_checkpoint(path: str | PathLike[str], load_format: str = "auto") -> Checkpoint:
    """Return the checkpoint at `path`.

    Args:
        path: a Hugging Face directory, a .gguf file, or a directory with a single .gguf file and
            no config.json.
        load_format: "gguf" takes the GGUF file of a directory that has a config.json too, and a
            file whatever its name; "safetensors" takes no GGUF file. Others choose by `path`.

    Raises:
        CheckpointError: nothing there that can be read, or it is damaged.
        ConfigError: a model that is not supported.
    """
    path = Path(path).expanduser()
    file = _gguf_file(path, load_format)
    if file is None:
        return HuggingFaceCheckpoint(path)
    if load_format == "safetensors":
        raise ConfigError(f"{file} is a GGUF file; load_format 'safetensors' needs a directory")
    from tvr.core.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(file)


class HuggingFaceCheckpoint:
    """A directory with config.json, tokenizer.json and *.safetensors."""

    def __init__(self, path: Path) -> None:
        """Read the config in directory `path`; raises as `open_checkpoint` does."""
        refuse_adapter(path)
        self._path = path
        self.config = ModelConfig.from_dir(path)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None: there is no tokenizer.json."""
        # Token ids in, token ids out needs no tokenizer.
        if not is_there(self._path / "tokenizer.json"):
            return None
        return Tokenizer.from_dir(self._path)

    def require_tokenizer(self) -> None:
        """Raise CheckpointError if there is no tokenizer.json."""
        if not is_there(self._path / "tokenizer.json"):
            Tokenizer.from_dir(self._path)  # says what there is instead

    def load_weights(
        self, *, dtype: str, device: torch.device | str, progress: Progress | None = None
    ) -> Weights:
        """Return the weights; raises as `tvr.core.weights.load_weights` does."""
        return load_weights(self._path, self.config, dtype=dtype, device=device, progress=progress)


def _gguf_file(path: Path, load_format: str) -> Path | None:
    """Return the GGUF file that `path` stands for; None: it is to be read as a directory."""
    asked = load_format == "gguf"
    if not path.is_dir():
        return path if asked or path.suffix == ".gguf" else None
    if not asked and (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        names = shorten([file.name for file in found])
        raise CheckpointError(f"{path} has {len(found)} GGUF files ({names}); name one of them")
    if asked:
        raise CheckpointError(f"{path} has no .gguf file, which load_format 'gguf' needs")
    return None
