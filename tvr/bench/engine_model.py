"""A model that is measured, and the engines on it, one for each backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tvr.bench.header import common_header
from tvr.contract import DeviceFacts
from tvr.core.checkpoint_source import open_checkpoint
from tvr.core.config import ModelConfig
from tvr.core.engine_config import EngineConfig
from tvr.core.llm import LLM
from tvr.core.loader import device_facts, resolve_dtype
from tvr.core.memory import context_limit, step_limits
from tvr.core.plugins import BackendManager, PluginConfig
from tvr.errors import BackendUnavailable, ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """What the engines of one benchmark have in common.

    Attributes:
        path: of the checkpoint.
        name: what it is called.
        config: the model's shape.
        device: where.
        dtype: of weights and activations.
        load_format: as in `EngineConfig`.
        max_model_len: as asked for; None: as long as what is measured.
        plugins: a plugins.toml; None: the packaged one.
        enforce_eager, batch_invariant: as in `EngineConfig`.
    """

    path: Path
    name: str
    config: ModelConfig
    device: DeviceFacts
    dtype: str
    load_format: str
    max_model_len: int | None
    plugins: Path | None
    enforce_eager: bool = False
    batch_invariant: bool = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str,
        device: str,
        dtype: str,
        load_format: str,
        max_model_len: int | None,
        plugins: Path | None,
        enforce_eager: bool = False,
        batch_invariant: bool = False,
    ) -> BenchModel:
        """Read the model's config and resolve "auto"; takes no memory for weights.

        Raises:
            CheckpointError, ConfigError, BackendUnavailable: it cannot be measured as asked.
        """
        asked = EngineConfig(
            device=device, dtype=dtype, load_format=load_format, max_model_len=max_model_len
        )
        config = open_checkpoint(path, load_format).config
        facts = device_facts(device)
        if max_model_len is not None:
            context_limit(asked, config)
        return cls(
            path=path,
            name=name,
            config=config,
            device=facts,
            dtype=resolve_dtype(asked, config, facts.type),
            load_format=load_format,
            max_model_len=max_model_len,
            plugins=plugins,
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
        )

    @property
    def fields(self) -> dict[str, Any]:
        """What rows say of the model: what tells them from those of others, and how it runs."""
        return {
            "model": self.name,
            "load_format": self.load_format,
            "dtype": self.dtype,
            "enforce_eager": self.enforce_eager,
            "batch_invariant": self.batch_invariant,
        }

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request that can be asked for."""
        return self.max_model_len or self.config.max_position_embeddings

    def refuse_longer(self, what: str, num_tokens: int) -> None:
        """Raise ConfigError if requests of `num_tokens` do not fit into the context."""
        if num_tokens > self.most_tokens:
            source = "--max-model-len" if self.max_model_len else "max_position_embeddings"
            raise ConfigError(
                f"{what} takes {num_tokens} tokens, prompt and answer; the context has "
                f"{self.most_tokens} ({source}); ask for less"
            )

    def step_limits(self, num_seqs: int) -> tuple[int | None, int | None]:
        """Return the max_num_seqs and max_num_batched_tokens to ask of an engine.

        None: the default, which holds `num_seqs` at once.
        """
        most_seqs, most_tokens = step_limits(EngineConfig(), self.device.type)
        seqs = num_seqs if num_seqs > most_seqs else None
        return seqs, num_seqs if num_seqs > most_tokens else None

    def load(
        self,
        backend: str,
        *,
        context: int,
        dtype: str | None = None,
        num_blocks: int | None = None,
        num_seqs: int = 1,
    ) -> LLM:
        """Return an engine with `backend` first, and without a prefix cache.

        Args:
            backend: its name.
            context: most tokens of a request.
            dtype: None: the model's.
            num_blocks: as in `EngineConfig`.
            num_seqs: requests that must run at once.

        Raises:
            TvrError: it cannot be loaded.
        """
        most_seqs, most_tokens = self.step_limits(num_seqs)
        return LLM(
            self.path,
            backend=backend,
            dtype=dtype or self.dtype,
            device=str(self.device),
            max_model_len=context,
            num_blocks=num_blocks,
            max_num_seqs=most_seqs,
            max_num_batched_tokens=most_tokens,
            enable_prefix_caching=False,
            load_format=self.load_format,
            plugins=self.plugins,
            enforce_eager=self.enforce_eager,
            batch_invariant=self.batch_invariant,
        )

    def backends(self, names: tuple[str, ...] | None) -> dict[str, tuple[str | None, str | None]]:
        """Return package and version of each backend; `names` None: of all that can run.

        Raises:
            BackendUnavailable: one of them cannot run here; says why.
            ConfigError: there are none.
        """
        manager = self._manager()
        found = [manager.require(name) for name in names] if names else manager.backends
        if not found:
            raise ConfigError(f"no backend can run on {self.device}; see `tvr backends`")
        return {b.name: (b.distribution, b.version) for b in found}

    def header(
        self,
        command: str,
        backends: dict[str, tuple[str | None, str | None]],
        protocol: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the header of a report; `backends` as `backends` returns them."""
        info = self._manager().require(next(iter(backends))).info
        return common_header(command, info, self.device, backends, protocol)

    def _manager(self) -> BackendManager:
        return BackendManager(PluginConfig.load(self.plugins), device=self.device)


def synchronise(llm: LLM) -> None:
    """Wait for all that the engine's device has been given."""
    if llm.parts.device.type == "cuda":
        torch.cuda.synchronize(torch.device(str(llm.parts.device)))


def others_at_work(llm: LLM, backend: str) -> dict[str, str]:
    """Return the ops that backends other than `backend` serve, wholly or in part, and who does."""
    return {
        op: ", ".join(names)
        for op, names in llm.parts.ops.served().items()
        if {part for name in names for part in name.split(" + ")} != {backend}
    }


def refuse_others(llm: LLM, backend: str) -> None:
    """Raise BackendUnavailable unless `backend` serves every op by itself."""
    if others := others_at_work(llm, backend):
        said = "; ".join(f"{op}: {who}" for op, who in others.items())
        raise BackendUnavailable(
            f"the reference must be backend {backend!r} alone, and others serve some of its ops "
            f"({said}); leave their pins out of the plug-in configuration"
        )
