"""The backend under test: binds specs and runs calls as core would."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.ledger import CheckFailed
from tvr.contract import (
    PROTOCOLS,
    BackendInfo,
    BoundOp,
    Bounds,
    DeviceFacts,
    OpSpec,
    StepMeta,
    check_bound,
    why_not,
)
from tvr.core.plugins import Backend, BackendManager, PluginConfig
from tvr.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

#: Room for the largest call of the suite.
BOUNDS = Bounds(max_num_seqs=64, max_num_tokens=8192, max_seq_len=16384, max_q_len=8192)
_WORKSPACE_ALIGNMENT = 256

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
    "argmax": ("out",),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op.

    Attributes:
        spec: what the op is bound for.
        args: everything `run` is given, by name; for `linear` `weight` and `bias` instead of
            `packed`.
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

    def replace(self, **args: object) -> Call:
        """Return the call with some arguments replaced."""
        return replace(self, args=self.args | args)


class Subject:
    """A plugin object, loaded as core would load it, and the device it is tested on.

    Args:
        plugin: the object, or a backend that is loaded already.
        device: where to test it.

    Attributes:
        info: what the backend declares.
        device: the device as hooks see it.
        torch_device: the device as torch sees it.

    Raises:
        PluginError: tvr would refuse to load the object; the message says why.
        BackendUnavailable: the backend's probe says that it cannot run on the device.
    """

    def __init__(self, plugin: object, device: DeviceFacts) -> None:
        backend = plugin if isinstance(plugin, Backend) else _load(plugin, device)
        self._backend = backend
        self.info: BackendInfo = backend.info
        self.device = device
        self.torch_device = torch.device(str(device))
        self._on_gpu = device.type == "cuda"
        self._stream = backend.call("tvr_stream", device=device) if self._on_gpu else None
        self._bound: dict[OpSpec, BoundOp] = {}

    @classmethod
    def installed(
        cls, name: str, device: DeviceFacts, config: PluginConfig | None = None
    ) -> Subject:
        """Return the installed backend of that name; `config` None: the packaged plugins.toml."""
        return cls(BackendManager(config, device=device).require(name), device)

    def why_not(self, spec: OpSpec) -> list[str]:
        """Return why the backend does not declare `spec`; empty: it does."""
        return why_not(self.info, spec, self.device)

    def bind(self, spec: OpSpec) -> BoundOp | None:
        """Return what the backend's own hook binds for `spec`."""
        bound = self._backend.call(f"tvr_bind_{spec.op}", spec=spec, device=self.device)
        return None if bound is None else check_bound(spec.op, bound)

    def run(self, call: Call) -> object:
        """Plan and run `call`; return what `run` returned, after the device is done.

        As in an engine, an op is bound and gets its workspace once for each spec, so that a call
        meets what the call before left there.
        """
        if self._on_gpu:
            torch.cuda.synchronize(self.torch_device)
        # With no stream of its own (None) this changes nothing.
        with torch.cuda.stream(self._stream):
            result = self._run(call)
        if self._on_gpu:
            torch.cuda.synchronize(self.torch_device)
        return result

    def _run(self, call: Call) -> object:
        op = call.spec.op
        if call.spec not in self._bound:
            self._bound[call.spec] = self._bind_for_runs(call.spec)
        bound = self._bound[call.spec]
        args = dict(call.args)
        if op == "linear":
            pair = args.pop("weight"), args.pop("bias")
            args["packed"] = pair if bound.pack is None else bound.pack(*pair)
        if bound.plan is not None:
            bound.plan(args.get("step") or _step_of_rows(call))
        parameters = list(inspect.signature(PROTOCOLS[op].__call__).parameters.values())[1:]
        positional = [args.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return bound.run(*positional, **args)

    def _bind_for_runs(self, spec: OpSpec) -> BoundOp:
        bound = self.bind(spec)
        if bound is None:
            raise CheckFailed(f"declares {spec} but tvr_bind_{spec.op} returned None")
        has_state = bound.plan is not None or bound.attach is not None
        if has_state and any(bound is other for other in self._bound.values()):
            raise CheckFailed("a BoundOp with a plan or a workspace must be new for each spec")
        if bound.workspace_bytes is not None and bound.attach is not None:
            bound.attach(self._workspace(bound.workspace_bytes(BOUNDS)))
        return bound

    def _workspace(self, num_bytes: int) -> Tensor:
        size = num_bytes + _WORKSPACE_ALIGNMENT
        buffer = torch.zeros(size, dtype=torch.uint8, device=self.torch_device)
        start = -buffer.data_ptr() % _WORKSPACE_ALIGNMENT
        return buffer[start : start + num_bytes]


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


def _step_of_rows(call: Call) -> StepMeta:
    """Return the step of a call that has none: its rows are one sequence of new tokens."""
    rows = next(iter(call.read.values()))
    num_tokens, device = len(rows), rows.device
    lens = [num_tokens] if num_tokens else []
    return StepMeta(
        block_table=torch.zeros(len(lens), num_tokens, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *lens], dtype=torch.int32, device=device),
        num_seqs=len(lens),
        num_tokens=num_tokens,
        max_q_len=num_tokens,
        max_seq_len=num_tokens,
        seq_lens_cpu=lens,
    )
