"""Claims about the accuracy of both attention ops on random inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import tolerance
from tvr.conformance.attending import BOTH, exact, judge, rows_of, run
from tvr.conformance.judge import within
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.sequences import attention_spec, random_sequences

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_OUTLIER = 20.0
_OUTLIER_CHANNELS = (3, 17)


def check_output_matches_oracle(backend: Subject, case: Case) -> None:
    """Each sequence's output is softmax(scale * q k^T) v, to the rounding of its dtype."""
    sequences = random_sequences(case)
    judge(case, sequences, run(backend, case, sequences))


def check_outlier_channels_match_oracle(backend: Subject, case: Case) -> None:
    """Channels twenty times as large as the others, which real keys have, are no harder."""
    sequences = random_sequences(case)
    for x in (*sequences.q, *sequences.k):
        x[..., [c % x.shape[-1] for c in _OUTLIER_CHANNELS]] *= _OUTLIER
    judge(case, sequences, run(backend, case, sequences))


def check_lse_is_natural_log(backend: Subject, case: Case) -> None:
    """lse is the natural log of the sum of exp(score), fp32; -inf where there is no key."""
    sequences = random_sequences(case)
    call = run(backend, case, sequences)
    for s, rows in enumerate(rows_of(sequences)):
        wanted = exact(case, sequences, s)
        lse = call["lse"][rows].cpu().double()
        limit = tolerance.lse_limit(wanted.largest_score)
        empty = wanted.lse.isneginf()
        if not lse[empty].isneginf().all():
            raise CheckFailed(f"lse of sequence {s}: a row without keys is not -inf")
        found, known = lse[~empty], wanted.lse[~empty]
        within(f"lse of sequence {s}", found, known, limit, f"must be within {limit:.3g}")


def check_empty_rows_are_zero(backend: Subject, case: Case) -> None:
    """A row without keys is exactly 0, whatever the output held before."""
    sequences = random_sequences(case)
    call = run(backend, case, sequences)
    for s, rows in enumerate(rows_of(sequences)):
        empty = exact(case, sequences, s).lse.isneginf()  # [q_len, H]
        found = call["out"][rows].cpu()[empty]
        within(f"empty rows of sequence {s}", found, torch.zeros(found.shape), 0.0, "must be 0")


def _has_lse(case: Case) -> bool:
    return attention_spec(case).return_lse


def _has_empty_rows(case: Case) -> bool:
    causal = attention_spec(case).causal
    pairs = zip(case.q_lens, case.kv_lens, strict=True)
    return any(q_len and (not kv_len or (causal and q_len > kv_len)) for q_len, kv_len in pairs)


CHECKS = (
    Check(run=check_output_matches_oracle, ops=BOTH),
    Check(run=check_outlier_channels_match_oracle, ops=BOTH),
    Check(run=check_lse_is_natural_log, ops=BOTH, applies=_has_lse),
    Check(run=check_empty_rows_are_zero, ops=BOTH, applies=_has_empty_rows),
)
