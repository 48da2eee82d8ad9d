"""The backend under test: binds specs and runs calls as core would."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    check_bound,
    why_not,
)
from tvr.errors import ConfigError

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
    """A plugin object and the device it is tested on.

    Attributes:
        info: what the backend declares.
        device: the device as hooks see it.
        torch_device: the device as torch sees it.
    """

    def __init__(self, plugin: object, device: DeviceFacts) -> None:
        if not hasattr(plugin, "tvr_backend_info"):
            raise ConfigError(
                f"check_backend was given {plugin!r}, which has no tvr_backend_info; give the "
                "plugin object that the entry point names (a module or an instance)"
            )
        self._plugin = plugin
        self.info: BackendInfo = plugin.tvr_backend_info()
        self.device = device
        self.torch_device = torch.device(str(device))

    def why_not(self, spec: OpSpec) -> list[str]:
        """Return why the backend does not declare `spec`; empty: it does."""
        return why_not(self.info, spec, self.device)

    def bind(self, spec: OpSpec) -> BoundOp | None:
        """Return what the backend's own hook binds for `spec`."""
        hook: Callable[..., object] | None = getattr(self._plugin, f"tvr_bind_{spec.op}", None)
        bound = None if hook is None else hook(spec=spec, device=self.device)
        return None if bound is None else check_bound(spec.op, bound)

    def run(self, call: Call) -> object:
        """Bind, plan and run `call`; return what `run` returned, after the device is done."""
        op = call.spec.op
        bound = self.bind(call.spec)
        if bound is None:
            raise CheckFailed(f"declares {call.spec} but tvr_bind_{op} returned None")
        if bound.workspace_bytes is not None and bound.attach is not None:
            bound.attach(self._workspace(bound.workspace_bytes(BOUNDS)))
        args = dict(call.args)
        if op == "linear":
            pair = args.pop("weight"), args.pop("bias")
            args["packed"] = pair if bound.pack is None else bound.pack(*pair)
        if bound.plan is not None and "step" in args:
            bound.plan(args["step"])
        parameters = list(inspect.signature(PROTOCOLS[op].__call__).parameters.values())[1:]
        positional = [args.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        result = bound.run(*positional, **args)
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)
        return result

    def _workspace(self, num_bytes: int) -> Tensor:
        size = num_bytes + _WORKSPACE_ALIGNMENT
        buffer = torch.zeros(size, dtype=torch.uint8, device=self.torch_device)
        start = -buffer.data_ptr() % _WORKSPACE_ALIGNMENT
        return buffer[start : start + num_bytes]
