"""What makes an object a backend: its hooks, their signatures, and what it declares.

pluggy alone lets most mistakes pass. A misspelt hook is never called, an argument with a default
is never given, a bind hook with too few arguments is called with fewer. Each is refused here,
when the plugin is loaded, with the name of the hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any

from pluggy import PluginManager

from tvr import hookspecs
from tvr.contract import ABI_MAJOR, ABI_MINOR, OPS, SPECS, BackendInfo, Box
from tvr.errors import AbiMismatch, PluginLoadError, TvrError

BIND = "tvr_bind_"

#: Every hook of this version -> the names of its arguments.
HOOKS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(spec).parameters)
    for name, spec in vars(hookspecs).items()
    if hasattr(spec, f"{hookspecs.PROJECT}_spec")
}


@dataclass(frozen=True)
class Plugin:
    """An object that passed every check.

    Attributes:
        impl: the module or instance that pluggy registers.
        info: what it declares.
        hooks: hook -> its implementation, bound to `impl`.
        notes: what was left aside because it belongs to a newer minor version.
    """

    impl: object
    info: BackendInfo
    hooks: dict[str, Callable[..., Any]]
    notes: list[str] = field(default_factory=list)

    def call(self, hook: str, **arguments: object) -> Any:  # noqa: ANN401
        """Call this plugin's `hook` with as many of `arguments` as it takes; None if it has none.

        Called straight, not through pluggy: pluggy would hide who answered, and one plugin that
        raises would end the call for all.
        """
        function = self.hooks.get(hook)
        if function is None:
            return None
        return function(**{n: arguments[n] for n in inspect.signature(function).parameters})


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type, unless it is tvr's own, and its message."""
    text = " ".join(str(error).split())
    if isinstance(error, TvrError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_plugin(loaded: object, pm: PluginManager) -> Plugin:
    """Return `loaded`, a module, an instance or a class, as a checked plugin.

    Raises:
        AbiMismatch: it was written for another major version.
        PluginLoadError: it breaks a rule of the contract.
    """
    plugin = _instance(loaded)
    marked = _marked(plugin, pm)
    info = _info(marked)
    newer = info.abi[1] > ABI_MINOR
    notes: list[str] = []

    def unknown(what: str, *, optional: bool = False) -> None:
        if not newer and not optional:
            raise PluginLoadError(f"{what} is not known to ABI {ABI_MAJOR}.{ABI_MINOR}")
        notes.append(f"{what} is newer than ABI {ABI_MAJOR}.{ABI_MINOR} and is left aside")

    hooks = {}
    for hook, (function, opts) in marked.items():
        if hook not in HOOKS:
            unknown(f"hook {hook}", optional=opts.get("optionalhook", False))
            continue
        _check_signature(hook, function, opts)
        hooks[hook] = function
    for op, boxes in info.ops.items():
        if op not in OPS:
            unknown(f"op {op}")
            continue
        if BIND + op not in hooks:
            raise PluginLoadError(f"declares op {op} but does not implement {BIND}{op}")
        for box in boxes:
            _check_box(op, box)
        spec_fields = {f.name for f in fields(SPECS[op])}
        for name in sorted(frozenset().union(*(box.fields for box in boxes)) - spec_fields):
            unknown(f"{op} field {name}")
    for hook in hooks:
        if hook.startswith(BIND) and hook.removeprefix(BIND) not in info.ops:
            raise PluginLoadError(
                f"implements {hook} but tvr_backend_info declares no op {hook.removeprefix(BIND)}"
            )
    return Plugin(plugin, info, hooks, notes)


def _instance(loaded: object) -> object:
    """Make an instance of a class: pluggy would register it and call its methods without self."""
    if not inspect.isclass(loaded):
        return loaded
    try:
        inspect.signature(loaded).bind()
    except TypeError as e:
        raise PluginLoadError(
            f"is the class {loaded.__name__}, which cannot be made without arguments ({e}); "
            "point the entry point at an instance or a module"
        ) from e
    try:
        return loaded()
    except (Exception, SystemExit) as e:
        raise PluginLoadError(
            f"is the class {loaded.__name__}, and making an instance of it raised {describe(e)}"
        ) from e


def _marked(
    plugin: object, pm: PluginManager
) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return hook -> (implementation, its pluggy options) of all that `plugin` marks as hooks."""
    marked: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
    for name in dir(plugin):
        opts = pm.parse_hookimpl_opts(plugin, name)
        if opts is not None:
            hook = opts.get("specname") or name
            if hook in marked:
                raise PluginLoadError(f"implements {hook} twice")
            marked[hook] = (getattr(plugin, name), dict(opts))
        elif (name in HOOKS or name.startswith(BIND)) and callable(getattr(plugin, name)):
            raise PluginLoadError(f"{name} is not marked with @tvr.hookimpl, so it would not count")
    return marked


def _info(marked: dict[str, tuple[Callable[..., Any], dict[str, Any]]]) -> BackendInfo:
    if "tvr_backend_info" not in marked:
        found = ", ".join(sorted(marked)) or "none"
        raise PluginLoadError(f"does not implement tvr_backend_info; its hooks: {found}")
    function, opts = marked["tvr_backend_info"]
    _check_signature("tvr_backend_info", function, opts)
    try:
        info = function()
    except (Exception, SystemExit) as e:
        raise PluginLoadError(f"tvr_backend_info raised {describe(e)}") from e
    if not isinstance(info, BackendInfo):
        raise PluginLoadError(
            f"tvr_backend_info returned {type(info).__name__}; it must return a BackendInfo"
        )
    if info.abi[0] != ABI_MAJOR:
        raise AbiMismatch(
            f"declares ABI {info.abi[0]}.{info.abi[1]}; this tvr has {ABI_MAJOR}.{ABI_MINOR}"
        )
    return info


def _check_box(op: str, box: Box) -> None:
    """Refuse what would raise later, when a spec is held against the box."""
    for f in fields(box):
        value = getattr(box, f.name)
        if f.name in ("min_sm", "max_rows"):
            right, wanted = type(value) is int, "a whole number"
        else:
            right, wanted = isinstance(value, Collection), "a list of values"
        if not right and (value is not None or f.name == "fields"):
            raise PluginLoadError(f"{op}: {f.name} of a Box is {value!r}; it must be {wanted}")


def _check_signature(hook: str, function: Callable[..., Any], opts: dict[str, Any]) -> None:
    if opts.get("hookwrapper") or opts.get("wrapper"):
        raise PluginLoadError(f"{hook} is a hook wrapper; a backend answers for itself only")
    wanted = HOOKS[hook]
    call = f"{hook}({', '.join(wanted)})"
    try:
        params = inspect.signature(function).parameters.values()
    except ValueError as e:  # a method without any parameter
        raise PluginLoadError(f"{hook} is a method that does not take self") from e
    for param in params:
        if param.default is not param.empty:
            # pluggy 1.6 never passes such an argument, it would always have its default.
            raise PluginLoadError(f"{hook}: {param.name} has a default; declare {call}")
        if param.kind is not param.POSITIONAL_OR_KEYWORD or param.name not in wanted:
            raise PluginLoadError(f"{hook}: {param} is not an argument of it; declare {call}")
    missing = [name for name in wanted if name not in {p.name for p in params}]
    if missing and hook.startswith(BIND):
        raise PluginLoadError(f"{hook} does not take {', '.join(missing)}; declare {call}")
