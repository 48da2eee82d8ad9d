"""What each op computes, in fp64 on the CPU, written from the maths.

Inputs are the *rounded* tensors a backend is given. Nothing here is shared with a backend, and
nothing here knows of blocks or slots: attention takes a sequence's keys and values as they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import AttentionSpec


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, rounding: str, *, relative_error: float = 0.0
) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` in x's dtype, rounded as `rounding` says.

    "twice" rounds to x's dtype before and after the product with the weight, "once" only after.
    `relative_error` is that of the normalised row, before any rounding.
    """
    exact = x.double()
    normed = exact / torch.sqrt((exact**2).mean(dim=-1, keepdim=True) + eps)
    normed = normed * (1 + relative_error)
    if rounding == "twice":
        normed = normed.to(x.dtype).double()
    return (normed * weight.double()).to(x.dtype)


def rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, heads, D] rotated, fp64, and the size of the terms that were added."""
    half = cos_sin_cache.shape[1] // 2
    angles = cos_sin_cache.double()[positions].unsqueeze(1)  # [T, 1, rotary_dim]
    cos, sin = angles[..., :half], angles[..., half:]
    exact = x.double()
    a, b, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    ac, bs, bc, as_ = (a * cos).abs(), (b * sin).abs(), (b * cos).abs(), (a * sin).abs()
    size = torch.cat([ac + bs, bc + as_, rest.abs()], dim=-1)
    return rotated, size


def silu_mul(x: Tensor) -> Tensor:
    """Return `gate / (1 + exp(-gate)) * up` for x [T, 2I], gate columns first; fp64."""
    width = x.shape[-1] // 2
    gate, up = x[..., :width].double(), x[..., width:].double()
    return gate / (1 + torch.exp(-gate)) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, fp64."""
    product = torch.einsum("ti,oi->to", x.double(), weight.double())
    return product if bias is None else product + bias.double()


def argmax(logits: Tensor) -> list[int]:
    """Return each row's lowest id of the largest logit; -1 for a row with a NaN."""
    return [
        -1 if any(map(math.isnan, row)) else row.index(max(row)) for row in logits.double().tolist()
    ]


class Attention(NamedTuple):
    """out [q_len, H, D], lse [q_len, H], both fp64, and the largest |score|."""

    out: Tensor
    lse: Tensor
    largest_score: float


def attention(spec: AttentionSpec, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """Return attention of one sequence: q [q_len, H, D]; k, v [kv_len, KVH, D]."""
    q_len, kv_len = q.shape[0], k.shape[0]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    largest_score = 0.0
    key, value = _per_query_head(spec, k.double()), _per_query_head(spec, v.double())
    for i in range(q_len):
        keys = _visible_keys(spec, i, q_len, kv_len)
        if keys.stop > keys.start:
            score = _scores(spec, scale, q[i].double(), key[keys])  # [keys, H]
            lse[i] = torch.logsumexp(score, dim=0)
            out[i] = torch.einsum("kh,khd->hd", torch.exp(score - lse[i]), value[keys])
            largest_score = max(largest_score, score.abs().max().item())
    return Attention(out, lse, largest_score)


def low_precision_attention(
    spec: AttentionSpec, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return `attention` as a plain half-precision program computes it, as a yardstick.

    Scores in fp32, softmax weights rounded to q's dtype, result rounded to q's dtype.
    """
    q_len, kv_len = q.shape[0], k.shape[0]
    out = torch.zeros_like(q)
    key, value = _per_query_head(spec, k.float()), _per_query_head(spec, v.float())
    for i in range(q_len):
        keys = _visible_keys(spec, i, q_len, kv_len)
        if keys.stop > keys.start:
            score = _scores(spec, scale, q[i].float(), key[keys])
            weights = torch.softmax(score, dim=0).to(q.dtype).float()
            out[i] = torch.einsum("kh,khd->hd", weights, value[keys]).to(q.dtype)
    return out


def _per_query_head(spec: AttentionSpec, x: Tensor) -> Tensor:
    """Return x [kv_len, KVH, D] as [kv_len, H, D]: query head h reads KV head h // group."""
    group = spec.num_heads // spec.num_kv_heads
    return x[:, [head // group for head in range(spec.num_heads)]]


def _scores(spec: AttentionSpec, scale: float, q: Tensor, key: Tensor) -> Tensor:
    """Return the scaled (and capped) scores [keys, H] of q [H, D] and key [keys, H, D]."""
    score = torch.einsum("khd,hd->kh", key, q) * scale
    return score if spec.softcap is None else spec.softcap * torch.tanh(score / spec.softcap)


def _visible_keys(spec: AttentionSpec, i: int, q_len: int, kv_len: int) -> slice:
    """Return the keys that row i sees; the last row stands at the last key (bottom-right)."""
    position = kv_len - q_len + i
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    return slice(first, max(first, position + 1) if spec.causal else kv_len)
