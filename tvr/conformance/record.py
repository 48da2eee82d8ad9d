"""A call of a running model, apart from it: enough to make the call again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.subject import Call

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.snapshot import Snapshot
    from tvr.contract import Bounds, StepMeta


@dataclass(frozen=True, kw_only=True)
class Record:
    """A call, and what came of it.

    Attributes:
        snapshot: the call as it was before.
        bounds: what the engine sized workspaces for.
        found, reference: the outputs of the backend and of the reference, by name; empty if it
            raised.
        finding: what was wrong, in words.
    """

    snapshot: Snapshot
    bounds: Bounds
    found: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    finding: str

    def call(self, device: torch.device) -> Call:
        """Return a copy of the call with contiguous inputs and outputs of their own."""
        call = self.snapshot.call
        args: dict[str, Any] = {
            name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in call.args.items()
        }
        step: StepMeta | None = args.get("step")
        if step is not None:
            args["step"] = replace(
                step,
                block_table=step.block_table.to(device),
                seq_lens=step.seq_lens.to(device),
                cu_seqlens_q=step.cu_seqlens_q.to(device),
            )
        return Call(spec=call.spec, args=args)

    def live_call(self, device: torch.device) -> Call:
        """Return the call as the model made it: inputs in wider rows, outputs in place."""
        call = self.call(device)
        args = call.args
        for name, strides in self.snapshot.strides.items():
            args[name] = _with_strides(args[name], strides)
        args |= {output: args[name] for output, name in self.snapshot.aliases.items()}
        return call


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return x laid out with `strides` in memory that holds NaN elsewhere."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    buffer = torch.full((max(size, 0),), torch.nan, dtype=x.dtype, device=x.device)
    return buffer.as_strided(x.shape, strides).copy_(x) if x.numel() else x
