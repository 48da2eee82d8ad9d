"""Fake backends for tests of the plug-in machinery: they count, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import DistributionFinder, MetadataPathFinder
from types import SimpleNamespace
from typing import Any

from tvr.contract import OPS, BackendInfo, BoundOp, Box, DeviceFacts
from tvr.core.ops import OpTable
from tvr.core.plugins import BackendManager, PluginConfig
from tvr.hookspecs import hookimpl

CPU = DeviceFacts(type="cpu")
GPU = DeviceFacts(type="cuda", index=0, sm=90)

BOX = Box(dtypes=("float32", "bfloat16"), devices=("cpu", "cuda"))


def no_run(*args: Any, **kwargs: Any) -> None:
    """Run of a fake op: nothing."""


def fake(
    name: str,
    ops: Mapping[str, Sequence[Box]] | Sequence[str] = OPS,
    *,
    bind: Mapping[str, Callable[..., Any]] | None = None,
    probe: Callable[..., Any] | None = None,
    stream: Callable[..., Any] | None = None,
    abi: tuple[int, int] = (1, 0),
    **hooks: Any,
) -> Any:
    """Return a backend object that binds `ops`; `asked` lists the specs its hooks were given.

    Args:
        ops: names (each with `BOX`), or op -> boxes.
        bind: op -> what to do instead of binding `no_run`, a function of (spec, device).
        hooks: further attributes, marked as hooks by the caller or not.
    """
    boxes = dict(ops) if isinstance(ops, Mapping) else {op: [BOX] for op in ops}
    info = BackendInfo(name=name, abi=abi, ops=boxes)
    plugin = SimpleNamespace(asked=[], tvr_backend_info=hookimpl(lambda: info))
    for op in boxes:
        answer = (bind or {}).get(op, lambda spec, device: BoundOp(run=no_run))
        setattr(plugin, f"tvr_bind_{op}", _bind_hook(plugin, answer))
    if probe is not None:
        plugin.tvr_probe = hookimpl(probe)
    if stream is not None:
        plugin.tvr_stream = hookimpl(stream)
    for key, value in hooks.items():
        setattr(plugin, key, value)
    return plugin


def _bind_hook(plugin: Any, answer: Callable[..., Any]) -> Any:
    @hookimpl
    def bind(spec, device):
        plugin.asked.append(spec)
        return answer(spec, device)

    return bind


def manager_of(
    *plugins: object,
    config: PluginConfig | None = None,
    device: DeviceFacts = CPU,
    site: object = None,
) -> BackendManager:
    """Return a manager of `plugins`, and of what is installed in the folder `site`, only."""
    installed = MetadataPathFinder.find_distributions(_context(site)) if site else ()
    return BackendManager(
        config or PluginConfig(), plugins=plugins, device=device, installed=installed
    )


def table_of(*plugins: object, device: DeviceFacts = CPU, **kwargs: Any) -> OpTable:
    """Return an op table over `plugins` alone; `config` and the table's own arguments as given."""
    manager = manager_of(*plugins, config=kwargs.pop("config", None), device=device)
    return OpTable(manager, device, **kwargs)


def _context(site: object) -> Any:
    paths = [str(p) for p in site] if isinstance(site, list | tuple) else [str(site)]
    return DistributionFinder.Context(path=paths)
