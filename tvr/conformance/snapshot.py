"""A running model's call, copied before the op runs, with no more of the KV pool than it touches.

The copy's pool has the blocks of interest in their order, behind one block of NaN, so that ids
differ from the model's but not by their order; block table and slots are renumbered to fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.fault import same_bits
from tvr.conformance.row_tables import one_by_one
from tvr.conformance.subject import UPDATED, Call
from tvr.contract import PROTOCOLS, OpSpec, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

_CACHES = ("k_cache", "v_cache")

#: Large, and not the business of any op to write: neither copied nor looked at afterwards.
_CONSTANTS = frozenset({"weight", "bias", "norm_weight", "cos_sin_cache"})


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a call was given.

    Attributes:
        call: its copy; outputs hold NaN, or -7 where they are integers, except caches and tables.
        strides: those of every input that was not contiguous, in elements.
        aliases: output -> the input that was the very same tensor.
        blocks: [n] int64, ids in the model's pool of the copy's blocks 1 to n; None: no pool, or
            that of the copy.
        renumbered: what block table or slots were before they were renumbered.
    """

    call: Call
    strides: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    blocks: Tensor | None = None
    renumbered: Mapping[str, Tensor] = field(default_factory=dict)

    def fresh_call(self) -> Call:
        """Return the call with outputs that may be written."""
        return self.call.replace(**{n: t.clone() for n, t in self.call.written.items()})

    def outputs(self, live: Call) -> dict[str, Tensor]:
        """Return the outputs of the call itself, caches cut down as in the copy."""
        return {n: self._cut(n, t) for n, t in live.written.items()}

    def changed_input(self, live: Call) -> str | None:
        """Return the name of an input that the op has written, though it is no output."""
        for name, before in self.call.read.items():
            if name in _CONSTANTS or name in self.aliases.values():
                continue
            after, before = self._cut(name, live.read[name]), self.renumbered.get(name, before)
            if not bool(same_bits(after, before).all()):
                return name
        return None

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        return cut(tensor, self.blocks) if self.blocks is not None and name in _CACHES else tensor


def call_of(spec: OpSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Return the call of an op's `run` with these arguments."""
    parameters = list(inspect.signature(PROTOCOLS[spec.op].__call__).parameters.values())[1:]
    given = dict(zip((p.name for p in parameters), args, strict=False)) | dict(kwargs)
    optional = {p.name: p.default for p in parameters if p.default is not p.empty}
    return Call(spec=spec, args=one_by_one(optional | given))


def take(live: Call, in_use: Tensor | None = None) -> Snapshot:
    """Return a snapshot of a call that has not run yet.

    Args:
        live: the call, with the model's own tensors.
        in_use: [n] int64, blocks that it must not damage, for ops that write the caches.
    """
    args, blocks, renumbered = dict(live.args), None, {}
    if "step" in args:
        renumbered["block_table"] = live["step"].block_table.clone()
        args["step"], blocks = _renumbered_step(live["step"], live["k_cache"].shape[2])
    elif "k_cache" in args:
        renumbered["slot_mapping"] = live["slot_mapping"].clone()
        args["slot_mapping"], blocks = _renumbered_slots(live, in_use)
    outputs = live.written
    strides: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    for name, tensor in args.items():
        if not isinstance(tensor, torch.Tensor) or name in _CONSTANTS:
            continue
        if name in _CACHES:
            assert blocks is not None
            args[name] = cut(tensor, blocks)
        elif name in outputs and name not in UPDATED:
            args[name] = _unfilled(tensor)
            for other, x in live.read.items():
                if _is_same(tensor, x):
                    aliases[name] = other
        else:
            args[name] = tensor.clone(memory_format=torch.contiguous_format)
            if not tensor.is_contiguous():
                strides[name] = tensor.stride()
    call = Call(spec=live.spec, args=args)
    return Snapshot(
        call=call, strides=strides, aliases=aliases, blocks=blocks, renumbered=renumbered
    )


def cut(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return a pool of one block of NaN and then `blocks` of `cache`."""
    return torch.cat([torch.full_like(cache[:1], torch.nan), cache[blocks]])


def _renumbered_step(step: StepMeta, block_size: int) -> tuple[StepMeta, Tensor]:
    table = step.block_table.long()
    column = torch.arange(table.shape[1], device=table.device) * block_size
    used = column < step.seq_lens.unsqueeze(1)  # ids behind these are garbage
    blocks = torch.unique(table[used])
    renumbered = torch.where(used, torch.searchsorted(blocks, table) + 1, 0)
    copied = replace(
        step,
        block_table=renumbered.to(step.block_table.dtype),
        seq_lens=step.seq_lens.clone(),
        cu_seqlens_q=step.cu_seqlens_q.clone(),
    )
    return copied, blocks


def _renumbered_slots(live: Call, in_use: Tensor | None) -> tuple[Tensor, Tensor]:
    num_blocks, _, block_size, _ = live["k_cache"].shape
    slots = live["slot_mapping"]
    # The ends of the pool, where a stray write lands first: slot -1 read as an index, say.
    ends = torch.tensor([0, num_blocks - 1], device=slots.device)
    written = slots[slots >= 0] // block_size
    blocks = torch.unique(torch.cat([ends, written, *([] if in_use is None else [in_use])]))
    renumbered = (torch.searchsorted(blocks, slots // block_size) + 1) * block_size
    return torch.where(slots < 0, slots, renumbered + slots % block_size), blocks


def _unfilled(output: Tensor) -> Tensor:
    value = torch.nan if output.is_floating_point() else -7
    return torch.full_like(output, value, memory_format=torch.contiguous_format)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
