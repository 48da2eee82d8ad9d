"""Is attention right? A few rows against fp64 on the device itself, which takes milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tvr.bench.attention_inputs import tokens_of
from tvr.conformance import tolerance
from tvr.conformance.judge import small_frobenius, within
from tvr.contract import AttentionDecodeSpec, AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.subject import Call


def judge_attention(call: Call) -> None:
    """Hold a few rows of a call against what they should be, by both rules of the suite.

    Raises:
        CheckFailed: says which row is off, and how far.
    """
    step = call["step"]
    is_decode = isinstance(call.spec, AttentionDecodeSpec)
    num_rows = len(call["q"])
    for row in sorted({0, num_rows // 3, num_rows // 2, max(0, num_rows - 2), num_rows - 1}):
        q_len = num_rows // step.num_seqs
        s, place = divmod(row, q_len)
        # Row i of a chunk that starts the sequence sees i + 1 keys.
        num_keys = step.seq_lens_cpu[s] - q_len + place + 1
        k, v = (tokens_of(call[n], step.block_table[s], num_keys) for n in ("k_cache", "v_cache"))
        name = f"sequence {s}" if is_decode else f"row {row}"
        _judge_row(name, call.spec, call["scale"], call["q"][row], k, v, call["out"][row])


def _judge_row(
    name: str, spec: object, scale: float, q: Tensor, k: Tensor, v: Tensor, found: Tensor
) -> None:
    """Judge one row: q, found [H, D]; k, v [n, KVH, D]."""
    assert isinstance(spec, AttentionSpec)
    exact = _attend(q, k, v, scale, torch.float64, torch.float64)
    plain = _attend(q, k, v, scale, torch.float32, q.dtype)
    wanted, score = exact.out.cpu(), exact.largest_score
    limit = tolerance.attention_limit(spec.dtype, len(k), score)
    small_frobenius(name, found, wanted, limit)
    error = (plain.out.to(q.dtype).cpu().double() - wanted).abs().max().item()
    single = tolerance.max_error_limit(spec.dtype, error, wanted.abs().max().item(), score)
    within(name, found, wanted, single, f"must be within {single:.3g}")


class _Attended(NamedTuple):
    out: Tensor
    largest_score: float


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, wide: torch.dtype, weights: torch.dtype
) -> _Attended:
    """Return attention of a row, computed in `wide`, softmax weights rounded to `weights`."""
    num_heads, head_dim = q.shape
    grouped = q.to(wide).view(k.shape[1], -1, head_dim)  # [KVH, group, D]
    key, value = (x.transpose(0, 1).to(wide) for x in (k, v))  # [KVH, n, D]
    scores = grouped @ key.transpose(1, 2) * scale
    rounded = torch.softmax(scores, dim=-1).to(weights).to(wide)
    return _Attended((rounded @ value).view(num_heads, head_dim), scores.abs().max().item())
