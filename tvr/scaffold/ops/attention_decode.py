"""`attention_decode`: one new token a sequence attends to all its keys in the paged cache.

The keys are taken in tiles, and a running softmax joins the tiles: the largest score so far, the
sum of exp(score - largest), and the values weighted likewise. So memory does not grow with the
context, as in a FlashAttention kernel, and a kernel can take its place step by step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import AttentionDecodeSpec, BoundOp, Box, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

# No window, no softcap, no mask but the causal one: a field that is not named is never asked for.
BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        fields=frozenset({"return_lse"}),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]

TILE_KEYS = 128
#: Stands for "no key yet". Unlike -inf it can be subtracted from itself.
LOWEST = torch.finfo(torch.float32).min


def bind(spec: AttentionDecodeSpec) -> BoundOp:
    """Return the op for one shape of heads and blocks; a kernel would be compiled here."""
    block_size = spec.block_size
    tile_blocks = max(1, TILE_KEYS // block_size)

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
        """q, out [S, H, D]; caches [blocks, KVH, block_size, D]; lse [S, H] fp32."""
        # Query head h reads KV head h // group_size.
        heads = (step.num_seqs, spec.num_kv_heads, spec.group_size)
        queries = q.float().reshape(*heads, spec.head_dim)
        largest = torch.full(heads, LOWEST, device=q.device)  # [S, KVH, G]
        total = torch.zeros_like(largest)
        result = torch.zeros_like(queries)  # [S, KVH, G, D]

        # In a captured graph max_seq_len is the bound: the number of tiles does not vary.
        num_blocks = min(-(-step.max_seq_len // block_size), step.block_table.shape[1])
        for first in range(0, num_blocks, tile_blocks):
            table = step.block_table[:, first : min(first + tile_blocks, num_blocks)]
            token = first * block_size + torch.arange(table.shape[1] * block_size, device=q.device)
            hidden = token >= step.seq_lens[:, None]  # [S, tile]
            # Entries past a sequence's end are garbage; any block will do in their place.
            table = table.masked_fill(hidden[:, ::block_size], 0)
            k, v = _tile(k_cache, table), _tile(v_cache, table)  # [S, KVH, tile, D]
            # Hidden slots may hold NaN, and 0 * NaN is NaN: replace them, do not weigh them.
            v = v.masked_fill(hidden[:, None, :, None], 0)
            scores = torch.einsum("skgd,sktd->skgt", queries, k) * scale
            scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))

            before, largest = largest, torch.maximum(largest, scores.amax(dim=-1))
            shrink = torch.exp(before - largest)
            weights = torch.exp(scores - largest[..., None])
            total = total * shrink + weights.sum(dim=-1)
            result = result * shrink[..., None] + torch.einsum("skgt,sktd->skgd", weights, v)

        # total is at least 1 (the largest score's own exp), and 0 only for a row without keys.
        out.copy_((result / total.clamp_min(1)[..., None]).view(out.shape))
        if lse is not None:
            lse.copy_((largest + total.log()).view(lse.shape))  # without keys: -inf
        return out

    return BoundOp(run=run)


def _tile(cache: Tensor, table: Tensor) -> Tensor:
    """Return the blocks of table [S, n] as [S, KVH, n * block_size, D] fp32."""
    blocks = cache[table].transpose(1, 2)  # [S, KVH, n, block_size, D]
    return blocks.flatten(2, 3).float()
