"""Claims about what must not matter to attention: blocks, tables, and tokens it cannot see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance.attending import BOTH, PREFILL, is_causal, rows_of, run, same_outputs
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check
from tvr.conformance.sequences import Paging, random_sequences

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_NAN = float("nan")


def check_unused_slots_are_never_read(backend: Subject, case: Case) -> None:
    """NaN in cache slots past a sequence's end, or in free blocks, changes no bit."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences, Paging(k_unused=0.0, v_unused=0.0))
    for k_unused, v_unused in ((0.0, _NAN), (_NAN, 0.0), (_NAN, _NAN)):
        paging = Paging(k_unused=k_unused, v_unused=v_unused)
        same_outputs(
            f"unused K {k_unused}, V {v_unused}", run(backend, case, sequences, paging), clean
        )


def check_table_past_the_end_is_never_read(backend: Subject, case: Case) -> None:
    """Block ids behind a sequence's last block may be anything."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    for garbage in (-1, 2**31 - 1):
        call = run(backend, case, sequences, Paging(table_end=garbage))
        same_outputs(f"table ends in {garbage}", call, clean)


def check_block_order_does_not_matter(backend: Subject, case: Case) -> None:
    """Renaming the physical blocks, and the table with them, changes no bit."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    for seed in (1, 2):
        same_outputs(
            "blocks renamed", run(backend, case, sequences, Paging(block_seed=seed)), clean
        )


def check_interleaved_cache_is_read_right(backend: Subject, case: Case) -> None:
    """The block stride is arbitrary: K and V of a block may lie side by side."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    same_outputs("interleaved", run(backend, case, sequences, Paging(interleaved=True)), clean)


def check_later_tokens_are_hidden(backend: Subject, case: Case) -> None:
    """Another last key and value change no bit of the rows before it."""
    sequences = random_sequences(case)
    clean = run(backend, case, sequences)
    for kv in (*sequences.k, *sequences.v):
        kv[-1:] *= -2
    call = run(backend, case, sequences)
    for s, rows in enumerate(rows_of(sequences)):
        earlier = slice(rows.start, max(rows.start, rows.stop - 1))
        what = f"rows before the last of sequence {s}"
        same_bits(what, call["out"][earlier], clean["out"][earlier])


CHECKS = (
    Check(run=check_unused_slots_are_never_read, ops=BOTH),
    Check(run=check_table_past_the_end_is_never_read, ops=BOTH),
    Check(run=check_block_order_does_not_matter, ops=BOTH),
    Check(run=check_interleaved_cache_is_read_right, ops=BOTH),
    Check(run=check_later_tokens_are_hidden, ops=PREFILL, applies=is_causal),
)
