"""The op table: which backend serves which op, settled once per spec.

The model calls `table.bind_at(spec, site).run` and keeps the bare callable, so no hook is called
in a step. Life of a table: bind every op of the model, `allocate` the workspaces, then `plan` each
step.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from tvr.contract import (
    BoundOp,
    Bounds,
    DeviceFacts,
    OpSpec,
    StepMeta,
)
from tvr.core.binding import Binder, Binding, PassedOver
from tvr.core.composites import compose
from tvr.core.plugin_checks import describe
from tvr.core.plugins import BackendManager
from tvr.core.watcher import Watcher
from tvr.errors import ConfigError, PluginError

#: Workspaces start at a multiple of this many bytes.
ALIGNMENT = 256

#: The part of a step that an op's plan is given; any other op's plan gets the whole step.
_STEP_PARTS = {"attention_decode": "decode", "attention_prefill": "prefill"}


class StepParts(Protocol):
    """What `plan` needs of a step: all of it, its decodes and its prefill chunks (None: none)."""

    @property
    def step(self) -> StepMeta: ...
    @property
    def decode(self) -> StepMeta | None: ...
    @property
    def prefill(self) -> StepMeta | None: ...


class OpTable:
    """Binds specs to backends.

    Args:
        manager: the backends and the configuration.
        device: the device `manager` has probed.
        strict: refuse an op that the best-ranked backend does not serve.
        backend: name of a backend to ask before all others; None or "auto": as configured.
        watcher: sees every call of an op that was bound by `bind_at`.
        graphs: whether steps may be CUDA graphs (see `Binder`).

    Attributes:
        backend: that name, or None.
        stream: the stream a backend needs to launch on (`torch.cuda.Stream`), or None. The
            engine must load, allocate, run and capture under it.

    Raises:
        BackendUnavailable: `backend` cannot be used; the message says why.
    """

    def __init__(
        self,
        manager: BackendManager,
        device: DeviceFacts,
        *,
        strict: bool = False,
        backend: str | None = None,
        watcher: Watcher | None = None,
        graphs: bool = False,
    ) -> None:
        if device != manager.device:
            raise ConfigError(f"the backends were probed for {manager.device}, not for {device}")
        self.backend = None if backend == "auto" else backend
        self._binder = Binder(manager, device, strict=strict, first=self.backend, graphs=graphs)
        self._watcher = watcher
        if watcher is not None:
            watcher.begin(manager, device)
        self.stream = self._binder.stream
        self._device = device
        self._bindings: dict[OpSpec, Binding] = {}  # in binding order, parts before their whole
        self._workspaces: list[Tensor] = []
        self._plans: list[tuple[str, Callable[[StepMeta], None]]] | None = None

    def bind(self, spec: OpSpec) -> BoundOp:
        """Return the op bound for `spec`; the same object every time.

        Raises:
            UnsupportedSpec: no backend serves it, or not the one that is pinned or, if strict,
                ranked best. The message has each backend's reasons.
            ConfigError: `spec` is new and the workspaces are allocated already.
        """
        if spec not in self._bindings:
            if self._plans is not None:
                raise ConfigError(f"{spec} must be bound before the workspaces are allocated")
            self._take(self._binder.settle(spec))
        return self._bindings[spec].bound

    def bind_at(self, spec: OpSpec, site: str) -> BoundOp:
        """Return what the model calls for `spec` at `site`, such as "layers.3.self_attn.o_proj".

        It is `bind(spec)` itself, unless there is a watcher.
        """
        bound = self.bind(spec)
        return bound if self._watcher is None else self._watched(self._bindings[spec], site)

    def serves_whole(self, spec: OpSpec, *, instead_of: OpSpec) -> bool:
        """Return whether one backend serves a composite, and may do so in place of another op.

        It may unless a better-ranked backend serves that one. Nothing is bound.

        Raises:
            UnsupportedSpec: the backend that the composite is pinned to does not serve it.
        """
        return self._binder.serves_whole(spec, instead_of)

    def allocate(self, bounds: Bounds) -> int:
        """Allocate the workspaces of all bound ops, once, and return their bytes.

        Each is zeroed, starts at a multiple of `ALIGNMENT` bytes and lives as long as the table.
        """
        if self._plans is not None:
            raise ConfigError("the workspaces of this table are allocated already")
        self._plans = []
        total = 0
        for binding in self._bindings.values():
            op, bound = binding.spec.op, binding.bound
            if bound.workspace_bytes is not None and bound.attach is not None:
                num_bytes = _ask(binding, "workspace_bytes", bounds)
                if not isinstance(num_bytes, int) or num_bytes < 0:
                    raise PluginError(
                        f"{op} of backend {binding.backend!r}: workspace_bytes returned "
                        f"{num_bytes!r}; it must return a number of bytes"
                    )
                self._workspaces.append(_aligned_zeros(num_bytes, str(self._device)))
                _ask(binding, "attach", self._workspaces[-1])
                total += num_bytes
            if bound.plan is not None:
                self._plans.append((_STEP_PARTS.get(op, "step"), bound.plan))
        return total

    def start(self, bounds: Bounds) -> None:
        """Let the watcher, if there is one, see every step from here on."""
        if self._watcher is not None:
            assert self._plans is not None, "the workspaces are allocated before"
            self._watcher.start(bounds)
            self._plans.append(("step", self._watcher.begin_step))

    def plan(self, batch: StepParts) -> None:
        """Run the plans of all bound ops for one step, in binding order, before its layers."""
        if self._plans is None:
            raise ConfigError("the workspaces must be allocated before the first step is planned")
        for part, plan in self._plans:
            step: StepMeta | None = getattr(batch, part)
            if step is not None:
                plan(step)

    @property
    def passed_over(self) -> list[PassedOver]:
        """Who might have served each bound op, and why it does not.

        A backend that serves all parts of a composed op is not listed for it. Those whose
        `backend` is `self.backend` are what a user who named it wants to hear.
        """
        bound = [passed for b in self._bindings.values() for passed in b.passed_over]
        return _unique([*bound, *self.left_out])

    @property
    def left_out(self) -> list[PassedOver]:
        """Who serves an op that was done without, so that steps can be CUDA graphs."""
        return _unique(self._binder.left_out.values())

    def served(self) -> dict[str, list[str]]:
        """Return op -> the backends that serve it; a composed op has "a + b", one per part."""
        found: dict[str, list[str]] = {}
        for spec, binding in self._bindings.items():
            names = found.setdefault(spec.op, [])
            if binding.backend not in names:
                names.append(binding.backend)
        return found

    def lacking(self, flag: str) -> dict[str, list[str]]:
        """Return op -> backends that serve it without declaring `flag` ("cuda_graph") for it."""
        found: dict[str, list[str]] = {}
        for spec, binding in self._bindings.items():
            if not binding.parts and flag not in binding.flags:
                names = found.setdefault(spec.op, [])
                if binding.backend not in names:
                    names.append(binding.backend)
        return found

    def plans_in_graph(self, *, prefill: bool) -> bool:
        """Whether the plans of a step, of decodes only or with `prefill` chunks, can be captured
        with it."""
        return all(
            "plan_in_graph" in binding.flags
            for spec, binding in self._bindings.items()
            if binding.bound.plan is not None and (prefill or spec.op != "attention_prefill")
        )

    def flags(self, spec: OpSpec) -> frozenset[str]:
        """Return what is declared for `spec` by the backend that serves it."""
        return self._binder.settle(spec).flags

    def culprit(self, error: BaseException) -> str | None:
        """Return "op of backend 'name'" for the op whose own code raised `error`; None: none did.

        Found from the traceback, so that calling an op costs nothing more.
        """
        owners = {
            code: f"{binding.spec.op} of backend {binding.backend!r}"
            for binding in self._bindings.values()
            if not binding.parts
            for function in filter(None, (binding.bound.run, binding.bound.plan))
            if (code := getattr(inspect.unwrap(function), "__code__", None)) is not None
        }
        found = [
            owners[frame.f_code]
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code in owners
        ]
        return found[-1] if found else None  # the innermost: an op may call another

    def explain_ops(self, specs: Iterable[OpSpec]) -> list[dict[str, Any]]:
        """Return, as JSON-able data, who serves each spec and why others do not; binds nothing.

        `backends` has an entry for each backend in rank order, usable or not, whose status is
        "serves", "serves a part", "passed over" (with reasons) or "not asked".
        """
        return [self._binder.explain(spec) for spec in specs]

    def _watched(self, binding: Binding, site: str) -> BoundOp:
        """Return what the watcher makes of a bound op, of a composed one part by part."""
        assert self._watcher is not None
        if binding.parts:
            return compose(binding.spec, [self._watched(part, site) for part in binding.parts])
        return self._watcher.watch(site, binding.backend, binding.spec, binding.bound)

    def _take(self, binding: Binding) -> None:
        """Note `binding` as used, its parts first, so that they are planned and get workspaces."""
        for part in binding.parts:
            self._take(part)
        self._bindings.setdefault(binding.spec, binding)


def _unique(passed_over: Iterable[PassedOver]) -> list[PassedOver]:
    return list({(p.op, p.backend, str(p.reasons)): p for p in passed_over}.values())


def _ask(binding: Binding, name: str, argument: object) -> Any:  # noqa: ANN401
    """Call a bound op's `name` at start-up; what it raises names the backend."""
    try:
        return getattr(binding.bound, name)(argument)
    except (Exception, SystemExit) as e:
        raise PluginError(
            f"{binding.spec.op} of backend {binding.backend!r}: {name} raised {describe(e)}"
        ) from e


def _aligned_zeros(num_bytes: int, device: str) -> Tensor:
    """Return [num_bytes] uint8 zeros; torch aligns to 64 bytes on the CPU, so cut to fit."""
    buffer = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -buffer.data_ptr() % ALIGNMENT
    return buffer[start : start + num_bytes]
