"""Claims about what must not matter to attention: blocks, tables, and tokens it cannot see."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tvr.conformance import pools
from tvr.conformance.attending import BOTH, PREFILL, is_causal, rows_of, run
from tvr.conformance.ledger import Check
from tvr.conformance.relations import same, same_outputs
from tvr.conformance.sequences import Paging, attention_spec, random_sequences

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_NAN = float("nan")


def check_unused_slots_are_never_read(backend: Subject, case: Case) -> None:
    """NaN in cache slots past a sequence's end, or in free blocks, changes nothing."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences, Paging(k_unused=0.0, v_unused=0.0))
    for k_unused, v_unused in ((0.0, _NAN), (_NAN, 0.0), (_NAN, _NAN)):
        paging = Paging(k_unused=k_unused, v_unused=v_unused)
        same_outputs(
            backend,
            f"unused K {k_unused}, V {v_unused}",
            run(backend, case, sequences, paging),
            clean,
        )


def check_table_past_the_end_is_never_read(backend: Subject, case: Case) -> None:
    """Block ids behind a sequence's last block may be anything."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    for garbage in (-1, 2**31 - 1):
        call = run(backend, case, sequences, Paging(table_end=garbage))
        same_outputs(backend, f"table ends in {garbage}", call, clean)


def check_block_order_does_not_matter(backend: Subject, case: Case) -> None:
    """Renaming the physical blocks, and the table with them, changes nothing."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    for seed in (1, 2):
        same_outputs(
            backend, "blocks renamed", run(backend, case, sequences, Paging(block_seed=seed)), clean
        )


def check_interleaved_cache_is_read_right(backend: Subject, case: Case) -> None:
    """The block stride is arbitrary: K and V of a block may lie side by side."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    same_outputs(
        backend, "interleaved", run(backend, case, sequences, Paging(interleaved=True)), clean
    )


def check_later_tokens_are_hidden(backend: Subject, case: Case) -> None:
    """Another last key and value change nothing in the rows before it."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    for kv in (*sequences.k, *sequences.v):
        kv[-1:] *= -2
    call = run(backend, case, sequences)
    for s, rows in enumerate(rows_of(sequences)):
        earlier = slice(rows.start, max(rows.start, rows.stop - 1))
        what = f"rows before the last of sequence {s}"
        same(backend, call, what, call["out"][earlier], clean["out"][earlier])


def check_nan_sequence_stays_alone(backend: Subject, case: Case) -> None:
    """A sequence of NaN changes nothing in the others, before or behind it."""
    clean = run(backend, case, random_sequences(case))
    filled = [s for s, q_len in enumerate(case.q_lens) if q_len]
    for bad in (filled[0], filled[-1]):
        sequences = random_sequences(case)
        for x in (sequences.q[bad], sequences.k[bad], sequences.v[bad]):
            x.fill_(_NAN)
        call = run(backend, case, sequences)
        for s, rows in enumerate(rows_of(sequences)):
            if s != bad:
                what = f"sequence {s}, {bad} is NaN"
                same(backend, call, what, call["out"][rows], clean["out"][rows])


def check_block_ids_beyond_16_bits_are_read(backend: Subject, case: Case) -> None:
    """Block 65,536 of a pool is not block 0."""
    far = pools.far_pools(attention_spec(case), backend.torch_device)
    _judge_moved(backend, case, far, pools.FAR_BLOCK)


def check_offsets_beyond_32_bits_are_read(backend: Subject, case: Case) -> None:
    """A block that lies 2^32 elements into the pool is not its first."""
    wide = pools.wide_pools(attention_spec(case), backend.torch_device)
    _judge_moved(backend, case, wide, pools.WIDE_BLOCK)


def _judge_moved(backend: Subject, case: Case, caches: list[Tensor], block: int) -> None:
    """Move the one block of the case to `block` of other pools, and refuse any difference."""
    sequences = random_sequences(case)
    near = run(backend, case, sequences)
    step = near["step"]
    for cache, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        cache[block] = near[name][step.block_table[0, 0]]
        cache[0] = -cache[block]
    moved = near.replace(
        k_cache=caches[0],
        v_cache=caches[1],
        step=replace(step, block_table=torch.full_like(step.block_table, block)),
        out=torch.full_like(near["out"], _NAN),
    )
    backend.run(moved)
    same_outputs(backend, f"block {block}", moved, near)


def _has_neighbours(case: Case) -> bool:
    return sum(1 for q_len in case.q_lens if q_len) > 1


CHECKS = (
    Check(run=check_unused_slots_are_never_read, ops=BOTH),
    Check(run=check_table_past_the_end_is_never_read, ops=BOTH),
    Check(run=check_block_order_does_not_matter, ops=BOTH),
    Check(run=check_interleaved_cache_is_read_right, ops=BOTH),
    Check(run=check_later_tokens_are_hidden, ops=PREFILL, applies=is_causal),
    Check(run=check_nan_sequence_stays_alone, ops=BOTH, applies=_has_neighbours),
    Check(run=check_block_ids_beyond_16_bits_are_read, ops=BOTH, applies=pools.fits_far_pools),
    Check(
        run=check_offsets_beyond_32_bits_are_read,
        ops=BOTH,
        applies=pools.fits_wide_pools,
        needs=pools.no_room_for_wide_pools,
    ),
)
