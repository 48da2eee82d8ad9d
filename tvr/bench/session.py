"""A run of `tvr bench`: backends loaded on one device, and the memory they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr.bench.buffers import Buffers
from tvr.bench.ceiling import ceilings
from tvr.bench.comparison import compare
from tvr.bench.gate import Gate
from tvr.bench.header import header, l2_bytes, nvidia_smi_name
from tvr.bench.peer import Peer
from tvr.conformance.subject import Subject
from tvr.conformance.tensors import torch_dtype
from tvr.core.plugins import BackendManager, PluginConfig
from tvr.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from tvr.bench.cells import Cell
    from tvr.bench.rows import Row
    from tvr.contract import DeviceFacts

_REFERENCE = "torch"


class Session:
    """Backends to compare.

    Args:
        names: the backends, the first one being compared with the others; None: all that can run
            here, in the configured order.
        device: where.
        plugins: a plugins.toml; None: the packaged one.
        command: the command line, for the header.

    Attributes:
        names: of the backends.
        header: facts of the run; `compare` adds the "ceiling" before its first cell.

    Raises:
        BackendUnavailable: one of them cannot run here; says why.
        ConfigError: there are none.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        device: DeviceFacts,
        plugins: Path | None,
        *,
        command: str,
    ) -> None:
        manager = BackendManager(PluginConfig.load(plugins), device=device)
        self.names = list(dict.fromkeys(names or [b.name for b in manager.backends]))
        if not self.names:
            raise ConfigError(f"no backend can run on {device}; see `tvr backends`")
        self._peers = [Peer(_subject(manager, name, device)) for name in self.names]
        reference = _subject(manager, _REFERENCE, device)
        self._gate = Gate(reference)
        self._device = reference.torch_device
        self._buffers = Buffers(self._device)
        known = [manager.known[name] for name in self.names]
        origins = {b.name: (b.distribution, b.version) for b in known}
        self.header: dict[str, Any] = header(command, self._peers, origins)

    def compare(self, cells: Sequence[Cell]) -> Iterator[list[Row]]:
        """Yield the rows of each cell, one for each backend."""
        dtype = torch_dtype(cells[0].spec.dtype)
        self.header["ceiling"] = ceilings(self._buffers, dtype, nvidia_smi_name(self._device))
        size = l2_bytes(self._device)
        yield from compare(cells, self._peers, self._gate, self._buffers, size)


def _subject(manager: BackendManager, name: str, device: DeviceFacts) -> Subject:
    backend = manager.require(name)
    try:
        return Subject(backend, device)
    except Exception as error:  # its hook for a stream is asked here
        raise BackendUnavailable(
            f"backend {name!r} cannot be used: {type(error).__name__}: {error}"
        ) from error
