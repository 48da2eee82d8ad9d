"""What each op computes, in fp64 on the CPU, written from the maths.

Inputs are the *rounded* tensors a backend is given. Nothing here is shared with a backend, and
nothing here knows of blocks or slots: attention takes a sequence's keys and values as they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tvr.contract import AttentionSpec

_MAX_SCORES = 1 << 22  # held at once; fp64: 32 MiB


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
    angles = cos_sin_cache[positions].double().unsqueeze(1)  # [T, 1, rotary_dim]
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


def low_precision_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `linear` as a plain program computes it whose result is of `dtype`, as a yardstick."""
    bias = None if bias is None else bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias)


def argmax(logits: Tensor) -> list[int]:
    """Return each row's lowest id of the largest logit; -1 for a row with a NaN."""
    return [
        -1 if any(map(math.isnan, row)) else row.index(max(row)) for row in logits.double().tolist()
    ]


class TopLogprobs(NamedTuple):
    """ids [R, 1 + k] int64; values [R, 1 + k] fp64; ranks [R] int64."""

    ids: Tensor
    values: Tensor
    ranks: Tensor


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> TopLogprobs:
    """Return each row's token (0 for a negative one) and the k likeliest, of equals the lower id.

    The largest logit of every row is finite.
    """
    exact = logits.double()
    order = exact.sort(dim=-1, descending=True, stable=True).indices
    tokens = tokens.clamp(min=0).unsqueeze(1)
    ids = torch.cat([tokens, order[:, :k]], dim=1)
    values = (exact - exact.logsumexp(dim=-1, keepdim=True)).gather(1, ids)
    return TopLogprobs(ids, values, 1 + (order == tokens).int().argmax(dim=-1))


class Attention(NamedTuple):
    """out [q_len, H, D], lse [q_len, H], both fp64, and the largest |score|."""

    out: Tensor
    lse: Tensor
    largest_score: float


def attention(spec: AttentionSpec, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """Return attention of one sequence: q [q_len, H, D]; k, v [kv_len, KVH, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    largest_score = 0.0
    key, value = _per_query_head(spec, k.double()), _per_query_head(spec, v.double())
    for rows in _tiles(spec, len(q), len(k)):
        score = _scores(spec, scale, q[rows].double(), key)  # [rows, H, keys]
        visible = _visible(spec, rows, len(q), len(k))
        largest_score = max(largest_score, score.abs().where(visible, 0.0).max().item())
        score = score.where(visible, -math.inf)
        lse[rows] = torch.logsumexp(score, dim=-1)
        # Selected, not multiplied: a row that sees no key has (-inf) - (-inf) here.
        weights = torch.exp(score - lse[rows].unsqueeze(-1)).where(visible, 0.0)
        out[rows] = torch.einsum("qhk,khd->qhd", weights, value)
    return Attention(out, lse, largest_score)


def low_precision_attention(
    spec: AttentionSpec, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return `attention` as a plain half-precision program computes it, as a yardstick.

    Scores in fp32, softmax weights rounded to q's dtype, result rounded to q's dtype.
    """
    out = torch.zeros_like(q)
    key, value = _per_query_head(spec, k.float()), _per_query_head(spec, v.float())
    for rows in _tiles(spec, len(q), len(k)):
        visible = _visible(spec, rows, len(q), len(k))
        score = _scores(spec, scale, q[rows].float(), key).where(visible, -math.inf)
        weights = torch.softmax(score, dim=-1).where(visible, 0.0).to(q.dtype).float()
        out[rows] = torch.einsum("qhk,khd->qhd", weights, value).to(q.dtype)
    return out


def _tiles(spec: AttentionSpec, q_len: int, kv_len: int) -> Iterator[slice]:
    """Yield the rows in tiles of not too many scores; none where there is no key to see."""
    size = max(1, _MAX_SCORES // max(1, spec.num_heads * kv_len))
    for start in range(0, q_len, size) if kv_len else ():
        yield slice(start, min(start + size, q_len))


def _per_query_head(spec: AttentionSpec, x: Tensor) -> Tensor:
    """Return x [kv_len, KVH, D] as [kv_len, H, D]: query head h reads KV head h // group."""
    group = spec.num_heads // spec.num_kv_heads
    return x[:, [head // group for head in range(spec.num_heads)]]


def _scores(spec: AttentionSpec, scale: float, q: Tensor, key: Tensor) -> Tensor:
    """Return the scaled (and capped) scores [rows, H, keys] of q [rows, H, D] and every key."""
    score = torch.einsum("qhd,khd->qhk", q, key) * scale
    return score if spec.softcap is None else spec.softcap * torch.tanh(score / spec.softcap)


def _visible(spec: AttentionSpec, rows: slice, q_len: int, kv_len: int) -> Tensor:
    """Return which keys each row sees, [rows, 1, keys]; the last row stands at the last key."""
    position = kv_len - q_len + torch.arange(rows.start, rows.stop).view(-1, 1, 1)
    key = torch.arange(kv_len)
    visible = key <= position if spec.causal else torch.full_like(key <= position, True)
    return visible if spec.window is None else visible & (key > position - spec.window)
