"""Claims about `kv_write`, and about the writing in `rope_kv_write`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import pools
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
    written = make_call(case, backend.torch_device)
    backend.run(written)
    for name in {"q_out", "k_out"} & call.args.keys():  # rotated all the same
        same_bits(name, call[name], written[name])


def check_interleaved_caches_are_written(backend: Subject, case: Case) -> None:
    """The block stride is arbitrary: K and V of a block may lie side by side."""
    call = make_call(case, backend.torch_device)
    both = torch.stack([call["k_cache"], call["v_cache"]], dim=1)  # [blocks, 2, KVH, ...]
    k_cache, v_cache = both.unbind(1)
    _run_and_judge(backend, call.replace(k_cache=k_cache, v_cache=v_cache))


def check_special_values_are_stored_as_they_are(backend: Subject, case: Case) -> None:
    """NaN, infinities, both zeros and the smallest numbers keep their bits."""
    call = make_call(case, backend.torch_device)
    tiny = torch.finfo(call["k"].dtype).smallest_normal
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, tiny, tiny / 2])
    for name in ("k", "v"):
        rows = call[name]
        rows.view(-1)[: len(special)] = special.to(rows)
        rows.view(-1)[-len(special) :] = special.to(rows)
    _run_and_judge(backend, call)


def check_block_ids_beyond_16_bits_are_written(backend: Subject, case: Case) -> None:
    """A slot in block 65,536 of a pool is not one in block 0."""
    far = pools.far_pools(_paged_spec(case), backend.torch_device)
    _judge_moved(backend, case, far, pools.FAR_BLOCK)


def check_offsets_beyond_32_bits_are_written(backend: Subject, case: Case) -> None:
    """A slot in a block that lies 2^32 elements into the pool is not one in its first block."""
    wide = pools.wide_pools(_paged_spec(case), backend.torch_device)
    _judge_moved(backend, case, wide, pools.WIDE_BLOCK)


def _judge_moved(backend: Subject, case: Case, caches: list[Tensor], block: int) -> None:
    """Write to `block` of other pools and look there, and at block 0, which must stay."""
    call = make_call(case, backend.torch_device)
    # The same rows in a cache of two blocks, which stand for the only two that matter.
    size = call["k_cache"].shape[2]
    offsets = call["slot_mapping"].argsort()  # distinct, and within one block
    small = {name: call[name][:2].cpu() for name in ("k_cache", "v_cache")}
    for cache, name in zip(caches, small, strict=True):
        cache[[0, block]] = call[name][:2]
    call = call.replace(k_cache=caches[0], v_cache=caches[1], slot_mapping=block * size + offsets)
    backend.run(call)
    for cache, (name, before) in zip(caches, small.items(), strict=True):
        rows = call.args.get("k_out", call["k"]) if name == "k_cache" else call["v"]
        wanted = _with_rows(before, rows.cpu(), size + offsets.cpu())
        same_bits(f"{name}, blocks 0 and {block}", cache[[0, block]], wanted)


def _paged_spec(case: Case) -> pools.PagedSpec:
    assert isinstance(case.spec, pools.PagedSpec)
    return case.spec


def _copies_bits(case: Case) -> bool:
    """Whether the cache is of the rows' dtype; another one rounds, and turns NaN into NaN."""
    return _paged_spec(case).kv_dtype is None


def _run_and_judge(backend: Subject, call: Call) -> None:
    before = {name: call[name].cpu().clone() for name in ("k_cache", "v_cache")}
    backend.run(call)
    rotated = call.args.get("k_out")
    k = call["k"] if rotated is None else rotated
    slots = call["slot_mapping"].cpu()
    same_bits("k_cache", call["k_cache"], _with_rows(before["k_cache"], k.cpu(), slots))
    same_bits("v_cache", call["v_cache"], _with_rows(before["v_cache"], call["v"].cpu(), slots))


def _with_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Return the cache with row t in slot slots[t], if that is not -1: the layout, written out."""
    block_size = cache.shape[2]
    kept = slots >= 0
    slots = slots[kept]
    cache[slots // block_size, :, slots % block_size] = rows[kept].to(cache.dtype)
    return cache


_WRITES = ("kv_write", "rope_kv_write")

CHECKS = (
    Check(run=check_rows_are_stored_bit_equal, ops=_WRITES),
    Check(run=check_slot_minus_one_writes_nothing, ops=_WRITES),
    Check(run=check_interleaved_caches_are_written, ops=_WRITES),
    Check(run=check_special_values_are_stored_as_they_are, ops=("kv_write",), applies=_copies_bits),
    Check(
        run=check_block_ids_beyond_16_bits_are_written, ops=_WRITES, applies=pools.fits_far_pools
    ),
    Check(
        run=check_offsets_beyond_32_bits_are_written,
        ops=_WRITES,
        applies=pools.fits_wide_pools,
        needs=pools.no_room_for_wide_pools,
    ),
)
