"""A GGUF file as a checkpoint: config, tokenizer and weights from one file."""

from __future__ import annotations

from pathlib import Path

import torch

from tvr.core.gguf.config import read_config
from tvr.core.gguf.file import GGUFFile
from tvr.core.gguf.tokenizer import has_tokenizer, read_tokenizer
from tvr.core.gguf.weights import check_tensors, load_gguf_weights
from tvr.core.tokenizer import Tokenizer
from tvr.core.weights import Progress, Weights
from tvr.errors import CheckpointError


class GGUFCheckpoint:
    """A `tvr.core.checkpoint_source.Checkpoint`, read from the GGUF file `path`."""

    def __init__(self, path: Path) -> None:
        """Read the header and check all that can be wrong, before memory is taken.

        Raises:
            CheckpointError: a file or tensor that is damaged, missing or unknown.
            ConfigError: a model that is not supported, or the gguf package is not installed.
        """
        self._file = GGUFFile.open(path)
        self.config = read_config(self._file)
        check_tensors(self._file, self.config)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None: the file has none."""
        files = read_tokenizer(self._file)
        return None if files is None else Tokenizer(files)

    def require_tokenizer(self) -> None:
        """Raise CheckpointError if the file has no tokenizer."""
        if not has_tokenizer(self._file):
            raise CheckpointError(
                f"{self._file.path} has no tokenizer, and text needs one; give a file that has"
            )

    def load_weights(
        self, *, dtype: str, device: torch.device | str, progress: Progress | None = None
    ) -> Weights:
        """Return the weights, dequantised, in `dtype` on `device`; see `load_gguf_weights`."""
        return load_gguf_weights(
            self._file, self.config, dtype=dtype, device=device, progress=progress
        )
