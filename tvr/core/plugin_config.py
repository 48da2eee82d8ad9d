"""plugins.toml: which backends are asked, in which order, with which pins and options."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvr.contract import OPS
from tvr.errors import PluginError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

LOCAL_FILE = "plugins.toml"
ENV_VARIABLE = "TVR_PLUGINS"


def find_config(path: str | None, env: Mapping[str, str]) -> Path | None:
    """Return the user's plugins file: `path`, else `TVR_PLUGINS`, else ./plugins.toml, else None.

    A file named by `path` or by the variable need not exist: loading it then says so.
    """
    named = path or env.get(ENV_VARIABLE)
    if named:
        return Path(named)
    local = Path(LOCAL_FILE)
    return local if local.is_file() else None


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    """The content of a plugins.toml.

    Backend names are checked by `BackendManager`, which alone knows what is installed.

    Attributes:
        order: backends in the order they are asked; one that is not listed is not asked.
        pins: op -> the only backend that may serve it.
        disabled: backends that are not even imported.
        options: backend -> what it reads in `tvr_configured`.
        source: where this came from, for messages.
    """

    order: tuple[str, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    disabled: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = "the given PluginConfig"

    def __post_init__(self) -> None:
        _refuse_unknown(f"{self.source}: pins name op", self.pins, OPS)
        doubled = sorted({name for name in self.order if self.order.count(name) > 1})
        if doubled:
            raise PluginError(f"{self.source}: order lists {', '.join(doubled)} more than once")
        off = sorted(set(self.pins.values()) & set(self.disabled))
        if off:
            raise PluginError(
                f"{self.source}: {', '.join(off)} is both pinned and disabled; drop one of the two"
            )

    @classmethod
    def load(cls, path: str | Path | None = None) -> PluginConfig:
        """Read the packaged defaults and, over them, the file at `path`.

        A key that the file gives replaces that key of the defaults as a whole.

        Raises:
            PluginError: the file is missing, is not TOML, or holds what it must not.
        """
        packaged = _parse((resources.files("tvr") / LOCAL_FILE).read_bytes(), "tvr's plugins.toml")
        if path is None:
            return cls._from_dict(packaged, "tvr's plugins.toml")
        try:
            content = Path(path).read_bytes()
        except OSError as e:
            raise PluginError(f"plugins file {path} cannot be read: {e.strerror}") from e
        return cls._from_dict({**packaged, **_parse(content, str(path))}, str(path))

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any], source: str) -> PluginConfig:
        known = [f.name for f in fields(cls) if f.name != "source"]
        _refuse_unknown(f"{source}: key", data, known)

        def need(where: str, value: object, kind: type, word: str) -> Any:  # noqa: ANN401
            if not isinstance(value, kind):
                raise PluginError(f"{source}: {where} is {value!r}; it must be {word}")
            return value

        def names(key: str) -> tuple[str, ...]:
            values = need(key, data[key], list, "a list of backend names")
            return tuple(need(f"{key} entry", v, str, "a backend name") for v in values)

        pins = need("pins", data["pins"], dict, "a table")
        options = need("options", data["options"], dict, "a table of tables")
        return cls(
            order=names("order"),
            disabled=names("disabled"),
            pins={op: need(f"pins.{op}", v, str, "a backend name") for op, v in pins.items()},
            options={k: need(f"options.{k}", v, dict, "a table") for k, v in options.items()},
            source=source,
        )

    def names(self) -> dict[str, str]:
        """Return every backend name used here, each with the key that uses it."""
        used = dict.fromkeys(self.options, "options")
        used |= dict.fromkeys(self.disabled, "disabled")
        used |= dict.fromkeys(self.pins.values(), "pins")
        return used | dict.fromkeys(self.order, "order")

    def read_only(self) -> Mapping[str, Any]:
        """Return this as nested read-only mappings and tuples, as `tvr_configured` gets it."""
        frozen: Mapping[str, Any] = _freeze({f.name: getattr(self, f.name) for f in fields(self)})
        return frozen


def _parse(content: bytes, source: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = tomllib.loads(content.decode("utf-8"))
    except ValueError as e:  # both a TOML error and bytes that are not UTF-8
        raise PluginError(f"{source} is not valid TOML: {' '.join(str(e).split())}") from e
    return parsed


def _refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise PluginError(f"{what} {unknown[0]!r} is not known; known: {', '.join(known)}")


def _freeze(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping):
        return MappingProxyType({k: _freeze(v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return value
