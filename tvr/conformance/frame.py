"""Tensors at fixed addresses, with room for any step up to some bounds, as a graph reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.checks_common import TOKEN_ARGS
from tvr.conformance.row_tables import padding_entry
from tvr.contract import AttentionDecodeSpec, AttentionSpec, Bounds, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.subject import Call

_CACHES = ("k_cache", "v_cache")
#: What a padding row holds; elsewhere NaN, which reaches whatever reads it.
_PADDING = {"positions": 0, "slot_mapping": -1, "output_positions": 0}
_UNWRITTEN_ID = -7  # in an integer output


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bounds of a step, and the blocks of its cache."""

    bounds: Bounds
    num_blocks: int


class Frame:
    """A call at its bounds, into which smaller ones are copied; what they leave is padding.

    Padding rows are as an engine makes them: length 0, slot -1. What must not be read is NaN, and
    so are outputs before they are written. The host integers of the step are the bounds.

    Attributes:
        call: the call at the bounds.
    """

    def __init__(self, call: Call, room: Room) -> None:
        bounds, device = room.bounds, next(iter(call.read.values())).device
        rows = dict.fromkeys(TOKEN_ARGS, bounds.max_num_tokens)
        rows |= dict.fromkeys(_CACHES, room.num_blocks)
        args: dict[str, Any] = {
            name: value.new_empty(rows.get(name, len(value)), *value.shape[1:])
            for name, value in call.args.items()
            if isinstance(value, torch.Tensor)
        }
        if isinstance(call.spec, AttentionSpec):
            args["step"] = _widest_step(bounds, call.spec.block_size, device)
        self.call = call.replace(**args)
        self._fixed = [name for name in args if name not in rows and name != "step"]
        for name in self._fixed:
            self.call[name].copy_(call[name])
        self.clear()

    def clear(self) -> None:
        """Make every row a padding row, and every output unwritten."""
        for name, tensor in self.call.args.items():
            if isinstance(tensor, torch.Tensor) and name not in self._fixed:
                tensor.fill_(_PADDING.get(name, _nothing_in(tensor)))
        if "entries" in self.call.args:
            self.call["entries"].copy_(padding_entry(self.call["block_table"]))
        if "rows" in self.call.read:
            self.call["rows"].fill_(len(self.call["last_token"]) - 1)
        step = self.call.args.get("step")
        if step is not None:
            step.block_table.fill_(-1)
            step.seq_lens.zero_()
            q_len = self._padding_q_len()
            torch.arange(len(step.cu_seqlens_q), out=step.cu_seqlens_q).mul_(q_len)

    def load(self, call: Call, *, first_block: int = 0) -> None:
        """Copy `call` in, its blocks from `first_block` on; the rest becomes padding."""
        self.clear()
        for name, value in call.args.items():
            if not isinstance(value, torch.Tensor):
                continue
            start = first_block if name in _CACHES else 0
            self.call[name][start : start + len(value)].copy_(value)
        if call.stores_in_slots:
            used = self.call["slot_mapping"][: len(call["slot_mapping"])]
            used += (used >= 0) * first_block * call["k_cache"].shape[2]
        step = call.args.get("step")
        if step is not None:
            self._load_step(step, first_block)

    def unload(self, call: Call, *, first_block: int = 0) -> None:
        """Copy what was written back to `call`."""
        for name, tensor in call.written.items():
            start = first_block if name in _CACHES else 0
            tensor.copy_(self.call[name][start : start + len(tensor)])

    def real_step(self, step: StepMeta) -> StepMeta:
        """Return the frame's step with the lengths of `step` as its host integers."""
        wide: StepMeta = self.call["step"]
        padding = [0] * (wide.num_seqs - step.num_seqs)
        return replace(
            wide,
            max_q_len=step.max_q_len,
            max_seq_len=step.max_seq_len,
            seq_lens_cpu=[*step.seq_lens_cpu, *padding],
        )

    def _load_step(self, step: StepMeta, first_block: int) -> None:
        wide: StepMeta = self.call["step"]
        num_seqs, columns = step.block_table.shape
        wide.block_table[:num_seqs, :columns] = step.block_table + first_block
        wide.seq_lens[:num_seqs] = step.seq_lens
        wide.cu_seqlens_q[: num_seqs + 1] = step.cu_seqlens_q
        padding = torch.arange(1, wide.num_seqs - num_seqs + 1, device=step.cu_seqlens_q.device)
        wide.cu_seqlens_q[num_seqs + 1 :] = step.cu_seqlens_q[-1] + padding * self._padding_q_len()

    def _padding_q_len(self) -> int:
        """Rows of a padding sequence: a decode has as many for each, a prefill none."""
        spec = self.call.spec
        return spec.max_q_len if isinstance(spec, AttentionDecodeSpec) else 0


def _nothing_in(tensor: Tensor) -> float:
    return float("nan") if tensor.is_floating_point() else _UNWRITTEN_ID


def _widest_step(bounds: Bounds, block_size: int, device: torch.device) -> StepMeta:
    """Return the step of the bounds; its device arrays are still to be filled."""
    num_seqs = bounds.max_num_seqs
    columns = -(-bounds.max_seq_len // block_size) + 1

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return StepMeta(
        block_table=empty(num_seqs, columns),
        seq_lens=empty(num_seqs),
        cu_seqlens_q=empty(num_seqs + 1),
        num_seqs=num_seqs,
        num_tokens=bounds.max_num_tokens,
        max_q_len=bounds.max_q_len,
        max_seq_len=bounds.max_seq_len,
        seq_lens_cpu=[bounds.max_seq_len] * num_seqs,
    )
