"""Claims about both attention ops on random inputs: accuracy, and what must not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.inputs import (
    DEFAULT_PAGING,
    Paging,
    Sequences,
    attention_call,
    attention_spec,
    random_sequences,
)
from tvr.conformance.judge import same_bits, small_frobenius, within
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.subject import Call
from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec, OpSpec

if TYPE_CHECKING:
    from tvr.conformance.cases import Case
    from tvr.conformance.subject import Subject

_NAN = float("nan")
_OUTLIER = 20.0
_OUTLIER_CHANNELS = (3, 17)


def check_output_matches_oracle(backend: Subject, case: Case) -> None:
    """Each sequence's output is softmax(scale * q k^T) v, to the rounding of its dtype."""
    sequences = random_sequences(case)
    _judge(case, sequences, _run(backend, case, sequences))


def check_outlier_channels_match_oracle(backend: Subject, case: Case) -> None:
    """Channels twenty times as large as the others, which real keys have, are no harder."""
    sequences = random_sequences(case)
    for x in (*sequences.q, *sequences.k):
        x[..., _OUTLIER_CHANNELS] *= _OUTLIER
    _judge(case, sequences, _run(backend, case, sequences))


def check_lse_is_natural_log(backend: Subject, case: Case) -> None:
    """lse is the natural log of the sum of exp(score), fp32; -inf where there is no key."""
    sequences = random_sequences(case)
    call = _run(backend, case, sequences)
    for s, rows in enumerate(_rows(sequences)):
        wanted = _oracle(case, sequences, s)
        lse = call["lse"][rows].cpu().double()
        limit = tolerance.lse_limit(wanted.largest_score)
        empty = wanted.lse.isneginf()
        if not lse[empty].isneginf().all():
            raise CheckFailed(f"lse of sequence {s}: a row without keys is not -inf")
        found, exact = lse[~empty], wanted.lse[~empty]
        within(f"lse of sequence {s}", found, exact, limit, f"must be within {limit:.3g}")


def check_empty_rows_are_zero(backend: Subject, case: Case) -> None:
    """A row without keys is exactly 0, whatever the output held before."""
    sequences = random_sequences(case)
    call = _run(backend, case, sequences)
    for s, rows in enumerate(_rows(sequences)):
        empty = _oracle(case, sequences, s).lse.isneginf()  # [q_len, H]
        found = call["out"][rows].cpu()[empty]
        within(f"empty rows of sequence {s}", found, torch.zeros(found.shape), 0.0, "must be 0")


def check_unused_slots_are_never_read(backend: Subject, case: Case) -> None:
    """NaN in cache slots past a sequence's end, or in free blocks, changes no bit."""
    sequences = random_sequences(case)
    clean = _run(backend, case, sequences, Paging(k_unused=0.0, v_unused=0.0))
    for k_unused, v_unused in ((0.0, _NAN), (_NAN, 0.0), (_NAN, _NAN)):
        paging = Paging(k_unused=k_unused, v_unused=v_unused)
        _same(f"unused K {k_unused}, V {v_unused}", _run(backend, case, sequences, paging), clean)


def check_table_past_the_end_is_never_read(backend: Subject, case: Case) -> None:
    """Block ids behind a sequence's last block may be anything."""
    sequences = random_sequences(case)
    clean = _run(backend, case, sequences)
    for garbage in (-1, 2**31 - 1):
        call = _run(backend, case, sequences, Paging(table_end=garbage))
        _same(f"table ends in {garbage}", call, clean)


def check_block_order_does_not_matter(backend: Subject, case: Case) -> None:
    """Renaming the physical blocks, and the table with them, changes no bit."""
    sequences = random_sequences(case)
    clean = _run(backend, case, sequences)
    for seed in (1, 2):
        _same("blocks renamed", _run(backend, case, sequences, Paging(block_seed=seed)), clean)


def check_interleaved_cache_is_read_right(backend: Subject, case: Case) -> None:
    """The block stride is arbitrary: K and V of a block may lie side by side."""
    sequences = random_sequences(case)
    clean = _run(backend, case, sequences)
    _same("interleaved", _run(backend, case, sequences, Paging(interleaved=True)), clean)


def check_batch_equals_sequences_alone(backend: Subject, case: Case) -> None:
    """A sequence gives the same alone: in bits if bound as batch_invariant, else as the oracle."""
    sequences = random_sequences(case)
    for s in range(len(sequences.q)):
        alone = _only(sequences, s)
        _judge(case, alone, _run(backend, case, alone))


def check_batch_invariant_sequences_keep_their_bits(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, a sequence has the same bits alone and in the batch."""
    case = replace(case, spec=replace(case.spec, batch_invariant=True))
    sequences = random_sequences(case)
    batch = _run(backend, case, sequences)
    for s, rows in enumerate(_rows(sequences)):
        alone = _run(backend, case, _only(sequences, s))
        same_bits(f"sequence {s} alone", alone["out"], batch["out"][rows])


def check_batch_invariant_rows_ignore_chunking(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, the rows of a chunk keep their bits when the chunk is split."""
    case = replace(case, spec=replace(case.spec, batch_invariant=True))
    sequences = random_sequences(case)
    whole = _run(backend, case, sequences)
    for s, rows in enumerate(_rows(sequences)):
        q, k, v = sequences.q[s], sequences.k[s], sequences.v[s]
        cut = len(q) // 2
        behind = len(k) - (len(q) - cut)  # keys that the first half of the chunk sees
        if not cut or behind < cut:
            continue
        halves = [
            Sequences(q=[q[:cut]], k=[k[:behind]], v=[v[:behind]], scale=sequences.scale),
            Sequences(q=[q[cut:]], k=[k], v=[v], scale=sequences.scale),
        ]
        found = torch.cat([_run(backend, case, half)["out"] for half in halves])
        same_bits(f"sequence {s} in two chunks", found, whole["out"][rows])


def check_max_splits_agrees(backend: Subject, case: Case) -> None:
    """Every declared bound on the number of splits gives the same to rounding."""
    sequences = random_sequences(case)
    for max_splits in (1, 2, 7, 64):
        spec = replace(attention_spec(case), max_splits=max_splits)
        other = replace(case, spec=spec)
        if not backend.why_not(spec):
            _judge(other, sequences, _run(backend, other, sequences))


def check_decode_continues_prefill(backend: Subject, case: Case) -> None:
    """The last row of a prefill is what a decode at its position gives."""
    decode = replace(case, spec=_decode_spec(attention_spec(case)))
    if backend.why_not(decode.spec):
        return
    sequences = random_sequences(case)
    with_rows = [s for s, q in enumerate(sequences.q) if len(q)]
    last = Sequences(
        q=[sequences.q[s][-1:] for s in with_rows],
        k=[sequences.k[s] for s in with_rows],
        v=[sequences.v[s] for s in with_rows],
        scale=sequences.scale,
    )
    _judge(case, sequences, _run(backend, case, sequences))
    _judge(decode, last, _run(backend, decode, last))


def check_later_tokens_are_hidden(backend: Subject, case: Case) -> None:
    """Another last key and value change no bit of the rows before it."""
    sequences = random_sequences(case)
    clean = _run(backend, case, sequences)
    for kv in (*sequences.k, *sequences.v):
        kv[-1:] *= -2
    call = _run(backend, case, sequences)
    for s, rows in enumerate(_rows(sequences)):
        earlier = slice(rows.start, max(rows.start, rows.stop - 1))
        what = f"rows before the last of sequence {s}"
        same_bits(what, call["out"][earlier], clean["out"][earlier])


def _decode_spec(spec: OpSpec) -> AttentionDecodeSpec:
    """The decode spec with the facts of a prefill spec."""
    assert isinstance(spec, AttentionPrefillSpec)
    facts = {name: value for name, value in vars(spec).items() if name != "max_q_len"}
    return AttentionDecodeSpec(**facts)


def _run(
    backend: Subject, case: Case, sequences: Sequences, paging: Paging = DEFAULT_PAGING
) -> Call:
    call = attention_call(case, sequences, backend.torch_device, paging)
    backend.run(call)
    return call


def _only(sequences: Sequences, s: int) -> Sequences:
    return Sequences(
        q=[sequences.q[s]], k=[sequences.k[s]], v=[sequences.v[s]], scale=sequences.scale
    )


def _rows(sequences: Sequences) -> list[slice]:
    """Return where each sequence's rows stand on the token axis."""
    rows, start = [], 0
    for q in sequences.q:
        rows.append(slice(start, start + len(q)))
        start += len(q)
    return rows


def _oracle(case: Case, sequences: Sequences, s: int) -> oracle.Attention:
    spec = attention_spec(case)
    return oracle.attention(spec, sequences.scale, sequences.q[s], sequences.k[s], sequences.v[s])


def _judge(case: Case, sequences: Sequences, call: Call) -> None:
    """Hold each sequence against the oracle by both rules of tolerance.py."""
    spec = attention_spec(case)
    for s, rows in enumerate(_rows(sequences)):
        q, k, v = sequences.q[s], sequences.k[s], sequences.v[s]
        if not len(q):
            continue
        found = call["out"][rows].cpu()
        wanted = _oracle(case, sequences, s)
        limit = tolerance.attention_limit(spec.dtype, len(k), wanted.largest_score)
        small_frobenius(f"sequence {s}", found, wanted.out, limit)
        plain = oracle.low_precision_attention(spec, sequences.scale, q, k, v).double()
        error = (plain - wanted.out).abs().max().item()
        largest = tolerance.max_error_limit(
            spec.dtype, error, wanted.out.abs().max().item(), wanted.largest_score
        )
        within(f"sequence {s}", found, wanted.out, largest, f"must be within {largest:.3g}")


def _same(what: str, found: Call, wanted: Call) -> None:
    for name, tensor in found.written.items():
        same_bits(f"{what}: {name}", tensor, wanted[name])


def _has_lse(case: Case) -> bool:
    return attention_spec(case).return_lse


def _has_empty_rows(case: Case) -> bool:
    causal = attention_spec(case).causal
    pairs = zip(case.q_lens, case.kv_lens, strict=True)
    return any(q_len and (not kv_len or (causal and q_len > kv_len)) for q_len, kv_len in pairs)


def _is_causal(case: Case) -> bool:
    return attention_spec(case).causal


_BOTH = ("attention_decode", "attention_prefill")
_PREFILL = ("attention_prefill",)

CHECKS = (
    Check(run=check_output_matches_oracle, ops=_BOTH),
    Check(run=check_outlier_channels_match_oracle, ops=_BOTH),
    Check(run=check_lse_is_natural_log, ops=_BOTH, applies=_has_lse),
    Check(run=check_empty_rows_are_zero, ops=_BOTH, applies=_has_empty_rows),
    Check(run=check_unused_slots_are_never_read, ops=_BOTH),
    Check(run=check_table_past_the_end_is_never_read, ops=_BOTH),
    Check(run=check_block_order_does_not_matter, ops=_BOTH),
    Check(run=check_interleaved_cache_is_read_right, ops=_BOTH),
    Check(run=check_batch_equals_sequences_alone, ops=_BOTH),
    Check(run=check_batch_invariant_sequences_keep_their_bits, ops=_BOTH, flag="batch_invariant"),
    Check(
        run=check_batch_invariant_rows_ignore_chunking,
        ops=_PREFILL,
        flag="batch_invariant",
        applies=_is_causal,
    ),
    Check(run=check_max_splits_agrees, ops=_BOTH, applies=lambda case: "splits" in case.name),
    Check(run=check_decode_continues_prefill, ops=_PREFILL, applies=_is_causal),
    Check(run=check_later_tokens_are_hidden, ops=_PREFILL, applies=_is_causal),
)
