"""Attention over tvr's paged cache, by torch's scaled_dot_product_attention (SDPA).

SDPA knows no pages: it wants the keys of a sequence in one piece. So both ops gather the blocks
that the block table names, and then call it. Sizes, in the order of the shapes below:

    S sequences, T tokens, H query heads, KVH KV heads, G = H / KVH heads of a group, D head_dim

SDPA knows grouped heads (`enable_gqa`), but not all of its kernels do, and the others copy K and
V for each head of a group. Both ops get round that by a view of the queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import StepMeta

#: Decodes are padded to the longest of those computed together, and a padded token takes memory
#: like any other: at most this many at once.
MAX_PADDED_TOKENS = 1 << 17


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: StepMeta,
    *,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend with one new token a sequence: q, out [S, H, D]. `lse` is None: it is not declared."""
    # Sizes come from the host's copy of the lengths, so that nothing waits for the device.
    longest = max(step.seq_lens_cpu, default=0)
    if longest == 0:  # no sequence, or nothing but padding rows
        return out.zero_()
    at_once = max(1, MAX_PADDED_TOKENS // longest)
    for start in range(0, step.num_seqs, at_once):
        rows = slice(start, start + at_once)
        seq_lens = step.seq_lens[rows]
        k, v, visible = _gather_padded(
            k_cache, v_cache, step.block_table[rows], seq_lens, max(step.seq_lens_cpu[rows])
        )
        # The heads of a group share their keys as the rows of a prompt do: [n, KVH, G, D].
        grouped = q[rows].unflatten(1, (k.shape[1], -1))
        result = scaled_dot_product_attention(
            grouped, k, v, attn_mask=visible[:, None, None], scale=scale
        )
        # A row without keys must give zeros; torch promises nothing for one that is all masked.
        empty = (seq_lens == 0)[:, None, None]
        out[rows] = result.flatten(1, 2).masked_fill(empty, 0)
    return out


def prefill(
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
    """Attend with a chunk of new tokens a sequence: q, out [T, H, D].

    `k` and `v`, the new rows, are in the cache already and are read from there.
    """
    edges = step.cu_seqlens_q.tolist()
    for s, kv_len in enumerate(step.seq_lens_cpu):
        start, end = edges[s], edges[s + 1]
        # The mask is aligned bottom-right: the last new token sees every key. So where there are
        # more new tokens than keys, the first ones see none, and must give zeros.
        first = max(start, end - kv_len)
        out[start:first] = 0
        if first < end:
            out[first:end] = _attend_causal(
                q[first:end],
                _gather(k_cache, step.block_table[s], kv_len),
                _gather(v_cache, step.block_table[s], kv_len),
                scale,
            )
    return out


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with the last n tokens of one sequence: q [n, H, D], k, v [KVH, kv_len, D]."""
    n, kv_len = len(q), k.shape[1]
    # SDPA's own `is_causal` aligns top-left, which is right only where n == kv_len.
    visible = torch.ones(n, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - n)
    # The KV heads take the place of the batch, the heads of a group that of the heads.
    grouped = q.unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [KVH, G, n, D]
    shape = (*grouped.shape[:2], kv_len, q.shape[2])
    result = scaled_dot_product_attention(
        grouped, k[:, None].expand(shape), v[:, None].expand(shape), attn_mask=visible, scale=scale
    )
    return result.permute(2, 0, 1, 3).flatten(1, 2)  # [n, H, D]


def _gather(cache: Tensor, block_ids: Tensor, kv_len: int) -> Tensor:
    """Return the first `kv_len` tokens of one sequence, [KVH, kv_len, D]."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    used = block_ids[: -(-kv_len // block_size)]  # ids past these are garbage
    blocks = cache.index_select(0, used)  # [blocks, KVH, block_size, D]
    return blocks.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :kv_len]


def _gather_padded(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return K and V of n sequences, [n, KVH, m, D], and which of them are tokens, [n, m]."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    num_blocks = -(-longest // block_size)
    token = torch.arange(num_blocks * block_size, device=block_table.device)
    visible = token < seq_lens[:, None]
    # The table is garbage past a sequence's end; block 0 is as good as any other there.
    used = visible[:, ::block_size]  # a block is used if its first slot is
    block_ids = block_table[:, :num_blocks].where(used, 0).flatten()

    def gather(cache: Tensor) -> Tensor:
        blocks = cache.index_select(0, block_ids).view(-1, num_blocks, *cache.shape[1:])
        tokens = blocks.transpose(1, 2).reshape(-1, num_kv_heads, len(token), head_dim)
        # A mask alone is not enough: an unused slot may hold a NaN, and 0 * NaN is NaN.
        return tokens.masked_fill_(~visible[:, None, :, None], 0)

    return gather(k_cache), gather(v_cache), visible
