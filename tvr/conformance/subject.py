"""The backend under test: binds specs and runs calls as core would."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.binding import Binding, step_of
from tvr.conformance.bounds import holding
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.model_spec import ModelSpec, why_not_model
from tvr.contract import (
    BackendInfo,
    BoundOp,
    Bounds,
    DeviceFacts,
    OpSpec,
    check_bound,
    why_not,
)
from tvr.core.plugins import Backend, BackendManager, PluginConfig
from tvr.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: Bindings that stay between calls: as many as a unit has named cases, and some drawn ones, as
#: long as their workspaces are no more than this.
_KEPT_BINDINGS = 64
_KEPT_BYTES = 4 << 30

#: The tensors that each op may write; all others are inputs.
WRITES: dict[str, tuple[str, ...]] = {
    "rms_norm": ("out",),
    "add_rms_norm": ("out", "residual_out"),
    "rope": ("q_out", "k_out"),
    "kv_write": ("k_cache", "v_cache"),
    "rope_kv_write": ("q_out", "k_out", "k_cache", "v_cache"),
    "attention_decode": ("out", "lse"),
    "attention_prefill": ("out", "lse"),
    "silu_mul": ("out",),
    "linear": ("out",),
    "fused_linear": ("out",),
    "argmax": ("out",),
    "prepare_step": (
        *("input_ids", "positions", "rows", "slot_mapping", "seq_lens", "step_block_table"),
        "block_table",
    ),
    "sample": ("out", "counts", "last_token"),
    "top_logprobs": ("ids", "values", "ranks"),
}

#: Tables with a row for each request, which an op updates: what they hold is an input too.
UPDATED = frozenset({"block_table", "counts", "last_token"})

#: Outputs that `run` is given but does not return.
_NOT_RETURNED = frozenset({"k_cache", "v_cache", "lse", *UPDATED})


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op.

    Attributes:
        spec: what the op is bound for.
        args: everything `run` is given, by name; for products `weight` and `bias` instead of
            `packed`, for `sample` each of its `tables`.
    """

    spec: OpSpec
    args: dict[str, Any]

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        return self.args[name]

    @property
    def written(self) -> dict[str, Tensor]:
        """The tensors this call may write, by name."""
        return {n: self[n] for n in WRITES[self.spec.op] if self[n] is not None}

    @property
    def read(self) -> dict[str, Tensor]:
        """The tensors this call must leave alone, by name."""
        tensors = {n: a for n, a in self.args.items() if isinstance(a, torch.Tensor)}
        if (step := self.args.get("step")) is not None:
            tensors |= {n: getattr(step, n) for n in ("block_table", "seq_lens", "cu_seqlens_q")}
        return {n: t for n, t in tensors.items() if n not in WRITES[self.spec.op]}

    @property
    def stores_in_slots(self) -> bool:
        """Whether each row of this call is stored in a slot of the caches."""
        return {"slot_mapping", "k_cache"} <= self.args.keys()

    def wrong_return(self, result: object) -> str:
        """Return how `result` differs from the outputs that `run` was given; "": not at all."""
        names = [n for n in WRITES[self.spec.op] if n not in _NOT_RETURNED]
        returned = result if isinstance(result, tuple) else () if result is None else (result,)
        if len(returned) == len(names) and all(
            found is self[name] for found, name in zip(returned, names, strict=True)
        ):
            return ""
        wanted = f"{' and '.join(names)} itself" if names else "None"
        return f"returned {type(result).__name__} instead of {wanted}"

    def replace(self, **args: object) -> Call:
        """Return the call with some arguments replaced."""
        return replace(self, args=self.args | args)


class Subject:
    """A plugin object, loaded as core would load it, and the device it is tested on.

    Args:
        plugin: the object, or a backend that is loaded already.
        device: where to test it.

    Attributes:
        backend: as core loaded it.
        info: what it declares.
        device: the device as hooks see it.
        torch_device: the device as torch sees it.
        stream: the backend's own, on which its ops are run; None: it takes any.

    Raises:
        PluginError: tvr would refuse to load the object; the message says why.
        BackendUnavailable: the backend's probe says that it cannot run on the device.
    """

    def __init__(self, plugin: object, device: DeviceFacts) -> None:
        backend = plugin if isinstance(plugin, Backend) else _load(plugin, device)
        self.backend = backend
        self.info: BackendInfo = backend.info
        self.device = device
        self.torch_device = torch.device(str(device))
        self._on_gpu = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = (
            backend.call("tvr_stream", device=device) if self._on_gpu else None
        )
        self._bindings: OrderedDict[tuple[OpSpec, Bounds], Binding] = OrderedDict()
        self._runner: Callable[[Call], object] = self._run

    @classmethod
    def installed(
        cls, name: str, device: DeviceFacts, config: PluginConfig | None = None
    ) -> Subject:
        """Return the installed backend of that name; `config` None: the packaged plugins.toml."""
        return cls(BackendManager(config, device=device).require(name), device)

    def why_not(self, spec: OpSpec) -> list[str]:
        """Return why the backend does not declare `spec`; empty: it does."""
        if isinstance(spec, ModelSpec):
            return why_not_model(spec, self.why_not)
        return why_not(self.info, spec, self.device)

    def bind(self, spec: OpSpec) -> BoundOp | None:
        """Return what the backend's own hook binds for `spec`."""
        bound = self.backend.call(f"tvr_bind_{spec.op}", spec=spec, device=self.device)
        return None if bound is None else check_bound(spec.op, bound)

    def run(self, call: Call) -> object:
        """Plan and run `call`; return what `run` returned, after the device is done.

        As in an engine, an op is bound and gets its workspace once for each spec, so that a call
        meets what the call before left there.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self.torch_device)
        # With no stream of its own (None) this changes nothing.
        with torch.cuda.stream(self.stream):
            result = self._runner(call)
        if self._on_gpu:
            torch.cuda.synchronize(self.torch_device)
        return result

    def answers(self) -> bool:
        """Return whether the device still works in this process; a CPU always does.

        After some errors of CUDA every later call fails, whoever makes it.
        """
        if self._on_gpu:
            try:
                torch.cuda.synchronize(self.torch_device)
            except RuntimeError:
                return False
        return True

    def with_runner(self, runner: Callable[[Call], object]) -> Subject:
        """Return this backend with another way to run a call: behind a delay, from a graph."""
        other = copy.copy(self)
        other._runner = runner
        return other

    def bind_declared(self, spec: OpSpec) -> BoundOp:
        """Return what the hook binds for a declared spec.

        Raises:
            CheckFailed: it returned None.
        """
        bound = self.bind(spec)
        if bound is None:
            raise CheckFailed(f"declares {spec} but tvr_bind_{spec.op} returned None")
        return bound

    def lacks(self, spec: OpSpec, *parts: str) -> list[str]:
        """Return that a declared spec is bound without any of these parts; empty: it has one."""
        try:
            bound = self.bind(spec)
        except (Exception, SystemExit):  # a check that binds it will say so
            return []
        if bound is None or any(getattr(bound, part) is not None for part in parts):
            return []
        return [f"binds {spec.op} without {' or '.join(parts)}"]

    def binding(self, spec: OpSpec, bounds: Bounds) -> Binding:
        """Return a new binding of a declared spec, with a workspace for `bounds`.

        Raises:
            CheckFailed: the hook returned None, or a `BoundOp` in use whose state would be shared.
        """
        bound = self.bind_declared(spec)
        has_state = bound.plan is not None or bound.attach is not None
        if has_state and any(bound is other.bound for other in self._bindings.values()):
            raise CheckFailed(
                "a BoundOp with a plan or a workspace must be new for each spec, and for each "
                "call of the bind hook"
            )
        return Binding(bound, bounds, self.torch_device)

    def _run(self, call: Call) -> object:
        key = call.spec, holding(step_of(call))
        if key not in self._bindings:
            self._bindings[key] = self.binding(*key)
            self._forget_the_oldest()
        self._bindings.move_to_end(key)
        return self._bindings[key](call)

    def _forget_the_oldest(self) -> None:
        def too_many() -> bool:
            num_bytes = sum(binding.num_bytes for binding in self._bindings.values())
            return len(self._bindings) > _KEPT_BINDINGS or num_bytes > _KEPT_BYTES

        while len(self._bindings) > 1 and too_many():
            self._bindings.popitem(last=False)


def device_facts(device: str) -> DeviceFacts:
    """Return the facts of torch's device of that name.

    Raises:
        ConfigError: torch knows no such device.
        BackendUnavailable: it knows it, but there is none.
    """
    try:
        asked = torch.device(device)
    except RuntimeError as e:
        raise ConfigError(f"device {device!r} is not known to torch: {e}") from e
    if asked.type != "cuda":
        return DeviceFacts(type=asked.type)
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"device {device!r} was asked for, but torch sees no CUDA device")
    index = torch.cuda.current_device() if asked.index is None else asked.index
    if index >= torch.cuda.device_count():
        raise BackendUnavailable(
            f"device {device!r} was asked for, but there are {torch.cuda.device_count()}"
        )
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return DeviceFacts(type="cuda", index=index, sm=10 * major + minor, name=name)


def _load(plugin: object, device: DeviceFacts) -> Backend:
    manager = BackendManager(PluginConfig(), plugins=[plugin], device=device, installed=())
    (backend,) = manager.ranked(usable=False)
    return manager.require(backend.name)
