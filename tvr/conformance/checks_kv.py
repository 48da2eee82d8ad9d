"""Claims about `kv_write`, and about the writing in `rope_kv_write`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check
from tvr.conformance.subject import Call

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


def check_rows_are_stored_bit_equal(backend: Subject, case: Case) -> None:
    """Each row lands in its slot, k in the K cache and v in the V cache; all else stays."""
    call = make_call(case, backend.torch_device)
    _run_and_judge(backend, call)


def check_slot_minus_one_writes_nothing(backend: Subject, case: Case) -> None:
    """A row of slot -1 leaves both caches alone, the very last slot too."""
    call = make_call(case, backend.torch_device)
    num_slots = call["k_cache"].shape[0] * call["k_cache"].shape[2]
    # Keep every third row, off the last slot, which a slot of -1 read as an index would hit.
    slots = call["slot_mapping"]
    kept = torch.arange(len(slots), device=slots.device) % 3 == 0
    call["slot_mapping"].masked_fill_(~kept | (slots == num_slots - 1), -1)
    _run_and_judge(backend, call)
    call = make_call(case, backend.torch_device)
    call["slot_mapping"].fill_(-1)
    _run_and_judge(backend, call)


def check_interleaved_caches_are_written(backend: Subject, case: Case) -> None:
    """The block stride is arbitrary: K and V of a block may lie side by side."""
    call = make_call(case, backend.torch_device)
    both = torch.stack([call["k_cache"], call["v_cache"]], dim=1)  # [blocks, 2, KVH, ...]
    k_cache, v_cache = both.unbind(1)
    _run_and_judge(backend, call.replace(k_cache=k_cache, v_cache=v_cache))


def _run_and_judge(backend: Subject, call: Call) -> None:
    before = {name: call[name].cpu().clone() for name in ("k_cache", "v_cache")}
    backend.run(call)
    rotated = call.args.get("k_out")
    k = call["k"] if rotated is None else rotated
    slots = call["slot_mapping"].tolist()
    same_bits("k_cache", call["k_cache"], _with_rows(before["k_cache"], k.cpu(), slots))
    same_bits("v_cache", call["v_cache"], _with_rows(before["v_cache"], call["v"].cpu(), slots))


def _with_rows(cache: Tensor, rows: Tensor, slots: list[int]) -> Tensor:
    """Return the cache with row t in slot slots[t]: the layout, written out."""
    block_size = cache.shape[2]
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            cache[slot // block_size, :, slot % block_size] = row.to(cache.dtype)
    return cache


_WRITES = ("kv_write", "rope_kv_write")

CHECKS = (
    Check(run=check_rows_are_stored_bit_equal, ops=_WRITES),
    Check(run=check_slot_minus_one_writes_nothing, ops=_WRITES),
    Check(run=check_interleaved_caches_are_written, ops=_WRITES),
)
