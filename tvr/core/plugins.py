"""The backends of one engine: loaded, checked, probed and put in order.

One broken plugin never takes the others with it: it stays in `BackendManager.known` with the
reason why it is not used, for `tvr backends` to show. Only asking for it by name raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import Distribution
from typing import Any

from pluggy import PluginManager

from tvr import hookspecs
from tvr.contract import ABI_MAJOR, ABI_MINOR, ENTRY_POINT_GROUP, OPS, DeviceFacts
from tvr.core.backend import (
    DISABLED,
    FAILED,
    NOT_INSTALLED,
    NOT_LISTED,
    OK,
    UNAVAILABLE,
    Backend,
)
from tvr.core.discovery import Candidate, discover
from tvr.core.plugin_checks import Plugin, check_plugin, describe
from tvr.core.plugin_config import PluginConfig
from tvr.errors import AbiMismatch, BackendUnavailable, ConfigError, PluginError, PluginLoadError

__all__ = ["Backend", "BackendManager", "PluginConfig"]


class BackendManager:
    """Every known backend, by name, and the usable ones in rank order.

    Rank: the objects given as `plugins`, as given, then `config.order`. A backend that is
    installed but neither listed, pinned nor asked for by name (`ranked(first=NAME)`) serves
    nothing.

    Args:
        config: None: the packaged plugins.toml.
        plugins: modules, instances or classes to use beside what is installed.
        device: what the backends are probed for.
        installed: distributions to look for entry points in; None: all of `sys.path`.

    Raises:
        ConfigError: an installed backend refuses its options.
        PluginError: `config` uses a name that no known backend has, or `plugins` holds an
            object that is no backend or has the name of an installed one.
    """

    def __init__(
        self,
        config: PluginConfig | None = None,
        *,
        plugins: Iterable[object] = (),
        device: DeviceFacts,
        installed: Iterable[Distribution] | None = None,
    ) -> None:
        self.config = PluginConfig.load() if config is None else config
        self.device = device
        self.known: dict[str, Backend] = {}
        self._pm = PluginManager(hookspecs.PROJECT)
        self._pm.add_hookspecs(hookspecs)
        # Historic: called now, pluggy calls it for each plugin in the moment it is registered.
        self._pm.hook.tvr_configured.call_historic(kwargs={"config": self.config.read_only()})

        found = discover(installed)
        self.notes = found.notes
        self._load_installed([c for c in found.candidates if c.major == ABI_MAJOR])
        self._note_other_majors([c for c in found.candidates if c.major != ABI_MAJOR])
        given = [self._load_given(obj) for obj in plugins]
        self._note_not_installed()
        self._refuse_unknown_names()
        for backend in self.known.values():
            self._probe(backend)
        self._rank = list(dict.fromkeys([*given, *self.config.order]))

    @property
    def backends(self) -> list[Backend]:
        """The usable backends in rank order."""
        return self.ranked()

    def ranked(self, first: str | None = None, *, usable: bool = True) -> list[Backend]:
        """Return the backends in rank order, `first` put before all; not `usable`: all of them."""
        names = dict.fromkeys([first, *self._rank] if first else self._rank)
        found = [self.known[name] for name in names]
        return [b for b in found if b.status == OK] if usable else found

    def require(self, name: str) -> Backend:
        """Return the usable backend `name`.

        Raises:
            BackendUnavailable: there is none of this name, or it cannot be used; says why.
        """
        backend = self.known.get(name)
        if backend is None:
            known = ", ".join(sorted(self.known))
            notes = "".join(f"; {note}" for note in self.notes)
            raise BackendUnavailable(f"backend {name!r} is not known; known: {known}{notes}")
        reasons = backend.why_not_used()
        if reasons:
            raise BackendUnavailable(
                f"backend {name!r} cannot be used: {'; '.join(reasons)}; see `tvr backends`"
            ) from backend.error
        return backend

    def refuse_broken(self) -> None:
        """Refuse to go on beside an installed plugin that is broken.

        Raises:
            PluginError: names each, and what is wrong with it.
        """
        broken = [
            f"{b.name} ({b.distribution} {b.version}) {'; '.join(b.reasons)}"
            for b in self.known.values()
            if b.status == FAILED
        ] + self.notes
        if broken:
            raise PluginError(
                f"strict refuses {len(broken)} broken plugin(s): {'. '.join(broken)}. Mend or "
                "uninstall each, or list it under `disabled` in plugins.toml"
            )

    def explain(self, first: str | None = None) -> dict[str, Any]:
        """Return every known backend, the ranked ones first, as JSON-able data.

        `first` is the backend that the op table was told to ask before all others, if any.
        """
        ranked = [b.name for b in self.ranked(first, usable=False)]
        names = dict.fromkeys([*ranked, *self.known])
        return {
            "abi": f"{ABI_MAJOR}.{ABI_MINOR}",
            "device": str(self.device),
            "config": self.config.source,
            "order": ranked,
            "pins": dict(self.config.pins),
            "notes": list(self.notes),
            "backends": [self._explain(self.known[name], name in ranked) for name in names],
        }

    def _explain(self, backend: Backend, ranked: bool) -> dict[str, Any]:
        status, reasons = backend.status, list(backend.reasons)
        if status == OK and not ranked and backend.name not in self.config.pins.values():
            status = NOT_LISTED
            reasons = ["is not in `order`; list it in plugins.toml or use --backend"]
        info = backend.plugin.info if backend.plugin else None
        return {
            "name": backend.name,
            "distribution": backend.distribution,
            "version": backend.version,
            "abi": ".".join(map(str, info.abi)) if info else None,
            "status": status,
            "reasons": reasons,
            "notes": list(backend.notes),
            "ops": [op for op in OPS if info and op in info.ops],
        }

    def _load_installed(self, candidates: list[Candidate]) -> None:
        by_name: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            by_name.setdefault(candidate.name, []).append(candidate)
        for name, same in by_name.items():
            same = self._without_impostors(name, same)
            backend = self.known[name] = Backend(
                name=name,
                status=OK,
                distribution=" and ".join(dict.fromkeys(c.distribution for c in same)),
                version=" and ".join(dict.fromkeys(c.version for c in same)),
            )
            if name in self.config.disabled:
                backend.status = DISABLED
                backend.reasons = [self._is_disabled()]
            elif len(same) > 1:
                owners = " and ".join(map(str, same))
                backend.fail(PluginLoadError(f"two plugins are named {name!r}: {owners}"))
            else:
                self._load(backend, same[0].load)

    def _without_impostors(self, name: str, same: list[Candidate]) -> list[Candidate]:
        """Leave out, with a note, what has a built-in's name: tvr must not lose its reference."""
        built_in = [c for c in same if c.is_built_in]
        if len(built_in) != 1:
            return same
        self.notes += [
            f"{c} is not loaded: {name!r} is a backend of tvr itself; it needs another name"
            for c in same
            if not c.is_built_in
        ]
        return built_in

    def _load(self, backend: Backend, load: Callable[[], object]) -> None:
        """Load, check and register one installed plugin; whatever it raises stays with it.

        But for what it says of plugins.toml: that is the user's, and as wrong as an unknown name.
        """
        try:
            plugin = check_plugin(load(), self._pm)
            if plugin.info.name != backend.name:
                raise PluginLoadError(
                    f"tvr_backend_info says {plugin.info.name!r}, the entry point "
                    f"{backend.name!r}; they must agree"
                )
            self._register(plugin)
        except (KeyboardInterrupt, ConfigError):
            raise  # the user's, for all one can tell
        except BaseException as e:  # SystemExit, and what test frameworks derive from it
            backend.fail(e)
        else:
            backend.plugin, backend.notes = plugin, plugin.notes

    def _load_given(self, obj: object) -> str:
        """Load an object given by the caller and return its name; what is wrong with it raises."""
        for backend in self.known.values():
            if backend.plugin is not None and backend.plugin.impl is obj:
                return backend.name  # installed as well: one plugin, which keeps its place here
        try:
            plugin = check_plugin(obj, self._pm)
            name = plugin.info.name
            if name in self.config.disabled:
                raise PluginLoadError(f"{name!r} {self._is_disabled()}")
            if name in self.known:
                other = self.known[name].distribution or "another object"
                raise PluginLoadError(f"two plugins are named {name!r}: {other} and this one")
            self._register(plugin)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            error = type(e) if isinstance(e, PluginError) else PluginLoadError
            label = getattr(obj, "__name__", type(obj).__name__)
            raise error(f"the given plugin {label!r}: {describe(e)}") from e
        self.known[name] = Backend(name=name, status=OK, plugin=plugin, notes=plugin.notes)
        return name

    def _register(self, plugin: Plugin) -> None:
        name = plugin.info.name
        try:
            self._pm.register(plugin.impl, name)
        except BaseException:
            # pluggy 1.6 leaves the hooks it had come to before the fault in place.
            if self._pm.has_plugin(name):
                self._pm.unregister(name=name)
            raise

    def _is_disabled(self) -> str:
        return f"is disabled in {self.config.source}"

    def _note_other_majors(self, candidates: list[Candidate]) -> None:
        """Note plugins of another ABI major: seen by their entry-point group, never imported."""
        for candidate in candidates:
            error = AbiMismatch(
                f"{candidate} is written for ABI {candidate.major}; this tvr loads "
                f"{ENTRY_POINT_GROUP} only"
            )
            if candidate.name in self.known:  # a package may ship one entry point per major
                self.known[candidate.name].notes.append(str(error))
                continue
            disabled = candidate.name in self.config.disabled
            self.known[candidate.name] = Backend(
                name=candidate.name,
                status=DISABLED if disabled else FAILED,
                distribution=candidate.distribution,
                version=candidate.version,
                reasons=[self._is_disabled()] if disabled else [str(error)],
                error=None if disabled else error,
            )

    def _note_not_installed(self) -> None:
        """Know the names in the packaged order even where they are not installed."""
        for name in PluginConfig.load().order:
            if name not in self.known:
                self.known[name] = Backend(
                    name=name, status=NOT_INSTALLED, reasons=["is not installed"]
                )

    def _refuse_unknown_names(self) -> None:
        for name, key in self.config.names().items():
            if name not in self.known:
                raise PluginError(
                    f"{self.config.source}: {key} names backend {name!r}, which is not known; "
                    f"known: {', '.join(sorted(self.known))}"
                )

    def _probe(self, backend: Backend) -> None:
        if backend.status != OK:
            return
        try:
            reasons = backend.call("tvr_probe", device=self.device)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            backend.error = e
            reasons = [f"tvr_probe raised {describe(e)}"]
        if reasons is None:  # it has no probe, so nothing speaks against it
            return
        if not isinstance(reasons, list) or not all(isinstance(r, str) for r in reasons):
            reasons = [f"tvr_probe returned {reasons!r}; it must return a list of reasons"]
        if reasons:
            backend.status, backend.reasons = UNAVAILABLE, reasons
