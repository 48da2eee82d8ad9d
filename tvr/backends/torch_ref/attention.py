"""Attention over the paged cache: `softmax(scale * q k^T) v`.

Row i of a sequence's q_len new tokens stands at position `kv_len - q_len + i` (the mask is
aligned bottom-right) and sees keys 0 to its own position. A row that sees no key gives zeros and
lse -inf. Exactly `kv_len` keys are taken from the cache, so that nothing behind them, not even a
NaN, can reach the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec, AttentionSpec, BoundOp, StepMeta
from tvr.errors import KernelError

if TYPE_CHECKING:
    from torch import Tensor

#: Scores held at once (fp32: 64 MiB); long prompts are worked off in tiles of query rows.
_MAX_SCORES = 1 << 24

#: Decodes are computed together while padding to the longest at most doubles the keys.
_MAX_PADDING = 2

# (q [n, H, D], k_cache, v_cache, block_ids, kv_len, scale, out, lse) of one sequence
_Attend = Callable[..., None]


def bind_decode(spec: AttentionDecodeSpec) -> BoundOp:
    attend = _attend_fn(spec)

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor:
        """One new token a sequence: q, out [S, H, D]; lse [S, H] fp32."""
        lens = step.seq_lens_cpu
        padded = len(lens) * max(lens, default=0)
        if len(lens) > 1 and 0 < padded <= _MAX_PADDING * sum(lens) and not spec.batch_invariant:
            _attend_together(spec, q, k_cache, v_cache, step, scale, out, lse)
            return out
        for s, kv_len in enumerate(lens):
            row = slice(s, s + 1)
            row_lse = None if lse is None else lse[row]
            attend(q[row], k_cache, v_cache, step.block_table[s], kv_len, scale, out[row], row_lse)
        return out

    return BoundOp(run=run)


def bind_prefill(spec: AttentionPrefillSpec) -> BoundOp:
    attend = _attend_fn(spec)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor:
        """A chunk of new tokens a sequence: q, out [T, H, D]; lse [T, H] fp32.

        k and v are in the cache already, and are read from there.
        """
        edges = itertools.pairwise(step.cu_seqlens_q.tolist())
        for s, ((start, end), kv_len) in enumerate(zip(edges, step.seq_lens_cpu, strict=True)):
            rows = slice(start, end)
            rows_lse = None if lse is None else lse[rows]
            attend(
                q[rows], k_cache, v_cache, step.block_table[s], kv_len, scale, out[rows], rows_lse
            )
        return out

    return BoundOp(run=run)


def _attend_fn(spec: AttentionSpec) -> _Attend:
    """Return the function that attends for one sequence as `spec` asks."""

    def attend(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_ids: Tensor,
        kv_len: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        q_len, num_heads, _ = q.shape
        # Rows before the first key: q_len > kv_len, or a sequence with no key at all.
        num_empty = max(0, q_len - kv_len) if spec.causal or kv_len == 0 else 0
        if num_empty:
            out[:num_empty] = 0
            if lse is not None:
                lse[:num_empty] = float("-inf")
        if num_empty == q_len:
            return

        k = _gather(k_cache, block_ids, kv_len)  # [KVH, kv_len, D] fp32
        v = _gather(v_cache, block_ids, kv_len)
        # One row a tile runs the very products that a decode at its position would.
        tile_rows = 1 if spec.batch_invariant else max(1, _MAX_SCORES // (num_heads * kv_len))
        for start in range(num_empty, q_len, tile_rows):
            end = min(start + tile_rows, q_len)
            # The last row of the tile sees no key behind its own position.
            visible = kv_len - (q_len - end) if spec.causal else kv_len
            first_position = kv_len - q_len + start
            _attend_tile(
                spec,
                q[start:end],
                k[:, :visible],
                v[:, :visible],
                first_position,
                scale,
                out[start:end],
                None if lse is None else lse[start:end],
            )

    return attend


def _attend_tile(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend for n rows q, out [n, H, D], lse [n, H] over keys k, v [KVH, m, D]."""
    n, num_heads, head_dim = q.shape
    num_kv_heads, m, _ = k.shape
    group = num_heads // num_kv_heads

    # Query head h reads KV head h // group: fold the group into the rows of its KV head.
    q_by_kv_head = q.float().view(n, num_kv_heads, group, head_dim).transpose(0, 1)
    q_by_kv_head = q_by_kv_head.reshape(num_kv_heads, n * group, head_dim)
    scores = torch.bmm(q_by_kv_head, k.transpose(1, 2)).mul_(scale)  # [KVH, n * group, m]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    hidden = _hidden_keys(spec, n, m, first_position, q.device)
    if hidden is not None:
        scores.view(num_kv_heads, n, group, m).masked_fill_(hidden, float("-inf"))

    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    result = torch.bmm(weights, v).div_(total)  # [KVH, n * group, D]

    out.view(n, num_kv_heads, group, head_dim).copy_(
        result.view(num_kv_heads, n, group, head_dim).transpose(0, 1)
    )
    if lse is not None:
        log_sum = largest + total.log()
        lse.view(n, num_kv_heads, group).copy_(log_sum.view(num_kv_heads, n, group).transpose(0, 1))


def _attend_together(
    spec: AttentionSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepMeta,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Decode S sequences in one go, padded to the longest: q, out [S, H, D], lse [S, H].

    The same maths as `_attend_tile`. Padding is never read as what it holds: ids of unused blocks
    become 0, scores there -inf and values 0, by selection, so that not even a NaN gets through.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    kv_len = max(step.seq_lens_cpu)
    num_blocks = -(-kv_len // block_size)
    lens = step.seq_lens.view(num_seqs, 1)
    key = torch.arange(num_blocks * block_size, device=q.device)
    hidden = key >= lens  # [S, m]
    if spec.window is not None:
        hidden |= key < lens - spec.window
    block_ids = step.block_table[:, :num_blocks].masked_fill(key[::block_size] >= lens, 0)

    def gather(cache: Tensor) -> Tensor:  # [S, KVH, m, D] fp32
        blocks = _blocks(cache, block_ids.flatten(), kv_len)
        blocks = blocks.view(num_seqs, num_blocks, *cache.shape[1:]).transpose(1, 2)
        tokens = torch.empty(blocks.shape, dtype=torch.float32, device=q.device)
        # One pass both orders and widens; `.float()` would keep the old order.
        return tokens.copy_(blocks).view(num_seqs, num_kv_heads, -1, head_dim)

    grouped = (num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = (q.float().view(grouped) @ gather(k_cache).transpose(2, 3)).mul_(scale)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores.masked_fill_(hidden.view(num_seqs, 1, 1, -1), float("-inf"))  # [S, KVH, group, m]
    largest = scores.amax(dim=-1, keepdim=True)
    largest.masked_fill_(largest == float("-inf"), 0)  # no key at all: (-inf) - (-inf) is NaN
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    values = gather(v_cache).masked_fill_(hidden.view(num_seqs, 1, -1, 1), 0)
    result = (weights @ values).div_(total.masked_fill(total == 0, 1))
    out.view(grouped).copy_(result)
    if lse is not None:
        lse.view(grouped[:3]).copy_((largest + total.log()).squeeze(-1))


def _hidden_keys(
    spec: AttentionSpec, n: int, m: int, first_position: int, device: torch.device
) -> Tensor | None:
    """Return the mask [n, 1, m] of keys that row i, at first_position + i, must not see."""
    ahead = spec.causal and first_position + 1 < m
    behind = spec.window is not None and first_position + n > spec.window
    if not (ahead or behind):
        return None
    position = torch.arange(first_position, first_position + n, device=device).view(n, 1, 1)
    key = torch.arange(m, device=device)
    hidden = key > position if spec.causal else torch.zeros_like(key > position)
    if spec.window is not None:
        hidden |= key <= position - spec.window
    return hidden


def _gather(cache: Tensor, block_ids: Tensor, kv_len: int) -> Tensor:
    """Return the sequence's first kv_len tokens as [KVH, kv_len, D] fp32."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    used = block_ids[: -(-kv_len // block_size)]  # ids behind these are garbage
    tokens = _blocks(cache, used, kv_len).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    return tokens[:, :kv_len].float()


def _blocks(cache: Tensor, block_ids: Tensor, kv_len: int) -> Tensor:
    """Return the named blocks [n, KVH, block_size, D], which hold up to kv_len tokens."""
    try:
        return cache.index_select(0, block_ids)
    except (IndexError, RuntimeError) as e:
        raise KernelError(
            f"attention: the block table names a block outside the pool of {len(cache)} "
            f"within the first {kv_len} tokens ({e})"
        ) from e
