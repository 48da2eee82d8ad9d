"""Claims about how attention work is cut up: batches, chunks, splits, prefill and decode."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tvr.conformance.attending import BOTH, PREFILL, is_causal, judge, only, rows_of, run
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check
from tvr.conformance.sequences import Sequences, attention_spec, random_sequences
from tvr.contract import AttentionDecodeSpec, OpSpec

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_MOST_ALONE = 12  # sequences of a batch tried by themselves


def check_batch_equals_sequences_alone(backend: Subject, case: Case) -> None:
    """A sequence is as right by itself as it is in a batch."""
    sequences = random_sequences(case)
    for s in _spread(len(sequences.q)):
        alone = only(sequences, s)
        judge(case, alone, run(backend, case, alone))


def check_empty_splits_weigh_nothing(backend: Subject, case: Case) -> None:
    """One key beside a long sequence, by whose length keys are split, is right all the same."""
    sequences = random_sequences(case)
    longest = max(range(len(case.kv_lens)), key=case.kv_lens.__getitem__)
    q, k, v = (x[longest] for x in (sequences.q, sequences.k, sequences.v))
    beside = Sequences(
        q=[q[-1:], q, q[-1:]],
        k=[k[:1], k, k[-1:]],
        v=[v[:1], v, v[-1:]],
        scale=sequences.scale,
    )
    judge(case, beside, run(backend, case, beside))


def check_batch_invariant_sequences_keep_their_bits(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, a sequence has the same bits alone and in the batch."""
    case = replace(case, spec=replace(case.spec, batch_invariant=True))
    sequences = random_sequences(case)
    batch = run(backend, case, sequences)
    rows = rows_of(sequences)
    for s in _spread(len(rows)):
        alone = run(backend, case, only(sequences, s))
        same_bits(f"sequence {s} alone", alone["out"], batch["out"][rows[s]])


def check_batch_invariant_rows_ignore_chunking(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, the rows of a chunk keep their bits when the chunk is split."""
    case = replace(case, spec=replace(case.spec, batch_invariant=True))
    sequences = random_sequences(case)
    whole = run(backend, case, sequences)
    for s, rows in enumerate(rows_of(sequences)):
        q, k, v = sequences.q[s], sequences.k[s], sequences.v[s]
        if not _can_be_cut(len(q), len(k)):
            continue
        cut = len(q) // 2
        behind = len(k) - (len(q) - cut)  # keys that the first half of the chunk sees
        halves = [
            Sequences(q=[q[:cut]], k=[k[:behind]], v=[v[:behind]], scale=sequences.scale),
            Sequences(q=[q[cut:]], k=[k], v=[v], scale=sequences.scale),
        ]
        found = torch.cat([run(backend, case, half)["out"] for half in halves])
        same_bits(f"sequence {s} in two chunks", found, whole["out"][rows])


def check_max_splits_agrees(backend: Subject, case: Case) -> None:
    """Every declared bound on the number of splits gives the same to rounding."""
    sequences = random_sequences(case)
    for max_splits in (1, 2, 7, 64):
        other = replace(case, spec=replace(attention_spec(case), max_splits=max_splits))
        judge(other, sequences, run(backend, other, sequences))


def check_decode_continues_prefill(backend: Subject, case: Case) -> None:
    """The last row of a prefill and a decode at its position are right by the same oracle."""
    decode = replace(case, spec=_decode_spec(case))
    sequences = random_sequences(case)
    with_rows = [s for s, q in enumerate(sequences.q) if len(q)]
    last = Sequences(
        q=[sequences.q[s][-1:] for s in with_rows],
        k=[sequences.k[s] for s in with_rows],
        v=[sequences.v[s] for s in with_rows],
        scale=sequences.scale,
    )
    judge(case, sequences, run(backend, case, sequences))
    judge(decode, last, run(backend, decode, last))


def _spread(num_seqs: int) -> range:
    """Return the sequences to try by themselves: all, or some of a large batch."""
    return range(0, num_seqs, -(-num_seqs // _MOST_ALONE))


def _decode_spec(case: Case) -> OpSpec:
    """The decode spec with the facts of a prefill spec."""
    facts = {name: value for name, value in vars(case.spec).items() if name != "max_q_len"}
    return AttentionDecodeSpec(**facts)


def _can_be_cut(q_len: int, kv_len: int) -> bool:
    """Whether both halves of a chunk have rows, and keys for all of these."""
    return 1 < q_len <= kv_len


def _has_chunk_to_cut(case: Case) -> bool:
    return is_causal(case) and any(map(_can_be_cut, case.q_lens, case.kv_lens))


def _has_blocks(case: Case) -> bool:
    """Whether the longest sequence, with rows, fills more than a block."""
    longest, q_len = max(zip(case.kv_lens, case.q_lens, strict=True))
    return q_len > 0 and longest > attention_spec(case).block_size


def _limits_splits(case: Case) -> bool:
    return attention_spec(case).max_splits is not None


CHECKS = (
    Check(run=check_batch_equals_sequences_alone, ops=BOTH),
    Check(run=check_empty_splits_weigh_nothing, ops=BOTH, applies=_has_blocks),
    Check(run=check_batch_invariant_sequences_keep_their_bits, ops=BOTH, flag="batch_invariant"),
    Check(
        run=check_batch_invariant_rows_ignore_chunking,
        ops=PREFILL,
        flag="batch_invariant",
        applies=_has_chunk_to_cut,
    ),
    Check(run=check_max_splits_agrees, ops=BOTH, applies=_limits_splits),
    Check(run=check_decode_continues_prefill, ops=PREFILL, applies=is_causal, also=_decode_spec),
)
