"""Run attention on sequences and hold the result against the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance import oracle, tolerance
from tvr.conformance.judge import small_frobenius, within
from tvr.conformance.sequences import (
    DEFAULT_PAGING,
    Paging,
    Sequences,
    attention_call,
    attention_spec,
)

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

BOTH = ("attention_decode", "attention_prefill")
PREFILL = ("attention_prefill",)


def run(
    backend: Subject, case: Case, sequences: Sequences, paging: Paging = DEFAULT_PAGING
) -> Call:
    """Return the call that attended to `sequences`."""
    call = attention_call(case, sequences, backend.torch_device, paging)
    backend.run(call)
    return call


def only(sequences: Sequences, s: int) -> Sequences:
    """Return sequence s by itself."""
    return Sequences(
        q=[sequences.q[s]], k=[sequences.k[s]], v=[sequences.v[s]], scale=sequences.scale
    )


def rows_of(sequences: Sequences) -> list[slice]:
    """Return where each sequence's rows stand on the token axis."""
    rows, start = [], 0
    for q in sequences.q:
        rows.append(slice(start, start + len(q)))
        start += len(q)
    return rows


def exact(case: Case, sequences: Sequences, s: int) -> oracle.Attention:
    """Return what the oracle says of sequence s."""
    spec = attention_spec(case)
    return oracle.attention(spec, sequences.scale, sequences.q[s], sequences.k[s], sequences.v[s])


def judge(case: Case, sequences: Sequences, call: Call) -> None:
    """Hold each sequence against the oracle by both rules of tolerance.py."""
    spec = attention_spec(case)
    for s, rows in enumerate(rows_of(sequences)):
        q, k, v = sequences.q[s], sequences.k[s], sequences.v[s]
        if not len(q):
            continue
        found = call["out"][rows].cpu()
        wanted = exact(case, sequences, s)
        limit = tolerance.attention_limit(spec.dtype, len(k), wanted.largest_score)
        small_frobenius(f"sequence {s}", found, wanted.out, limit)
        plain = oracle.low_precision_attention(spec, sequences.scale, q, k, v).double()
        error = (plain - wanted.out).abs().max().item()
        largest = tolerance.max_error_limit(
            spec.dtype, error, wanted.out.abs().max().item(), wanted.largest_score
        )
        within(f"sequence {s}", found, wanted.out, largest, f"must be within {largest:.3g}")


def is_causal(case: Case) -> bool:
    """Whether a row sees no key behind its own position."""
    return attention_spec(case).causal
