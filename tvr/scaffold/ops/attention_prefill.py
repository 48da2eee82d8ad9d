"""`attention_prefill`: a chunk of new tokens a sequence attends to all keys up to its own.

Row i of a chunk of n tokens stands at position kv_len - n + i and sees keys 0 to its own
position. k and v of the chunk are in the cache already, and are read from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import AttentionPrefillSpec, BoundOp, Box, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

# No "cuda_graph": where each chunk begins is read from the device, and the host waits for it.
BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        fields=frozenset({"return_lse"}),
        flags=frozenset({"deterministic"}),
    )
]

#: Rows worked off at once, so that not all scores [H, n, kv_len] are held.
TILE_ROWS = 32
#: Stands for the largest score of a row that sees no key: -inf less itself would be NaN.
LOWEST = torch.finfo(torch.float32).min


def bind(spec: AttentionPrefillSpec) -> BoundOp:
    """Return the op for one shape of heads and blocks; a kernel would be compiled here."""

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
        """q, out [T, H, D]; k, v [T, KVH, D]; lse [T, H] fp32."""
        # Query head h reads KV head h // group_size.
        heads = (spec.num_kv_heads, spec.group_size)
        begins = step.cu_seqlens_q.tolist()
        for s, kv_len in enumerate(step.seq_lens_cpu):
            begin, end = begins[s], begins[s + 1]
            if kv_len == 0:  # padding: no keys at all
                out[begin:end] = 0
                if lse is not None:
                    lse[begin:end] = float("-inf")
                continue
            used = step.block_table[s, : -(-kv_len // spec.block_size)]  # garbage behind these
            keys, values = (_tokens(cache, used, kv_len) for cache in (k_cache, v_cache))
            first_position = kv_len - (end - begin)
            for row in range(begin, end, TILE_ROWS):
                rows = slice(row, min(row + TILE_ROWS, end))
                queries = q[rows].float().reshape(-1, *heads, spec.head_dim)  # [n, KVH, G, D]
                position = first_position + torch.arange(
                    rows.start - begin, rows.stop - begin, device=q.device
                )
                hidden = torch.arange(kv_len, device=q.device) > position[:, None]  # [n, kv_len]
                result, row_lse = _attend(queries, keys, values, hidden, scale)
                out[rows] = result.flatten(1, 2)
                if lse is not None:
                    lse[rows] = row_lse.flatten(1, 2)
        return out

    return BoundOp(run=run)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the result [n, KVH, G, D] and lse [n, KVH, G] of n rows; zeros and -inf if no key."""
    scores = torch.einsum("nkgd,ktd->nkgt", queries, keys) * scale
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    largest = scores.amax(dim=-1).clamp_min(LOWEST)
    weights = torch.exp(scores - largest[..., None])
    total = weights.sum(dim=-1)
    result = torch.einsum("nkgt,ktd->nkgd", weights, values) / total[..., None]
    result = result.masked_fill(total[..., None] == 0, 0)  # without keys it was 0 / 0
    return result, largest + total.log()


def _tokens(cache: Tensor, block_ids: Tensor, kv_len: int) -> Tensor:
    """Return the first kv_len tokens of a sequence's blocks as [KVH, kv_len, D] fp32."""
    blocks = cache[block_ids].transpose(0, 1)  # [KVH, blocks, block_size, D]
    return blocks.flatten(1, 2)[:, :kv_len].float()
