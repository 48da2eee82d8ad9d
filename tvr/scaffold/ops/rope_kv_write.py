"""`rope_kv_write`: `rope`, then `kv_write` of the turned keys and of the values.

In a kernel the two are one pass over k. Here they are the two ops, one behind the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.contract import BoundOp, Box, RopeKvWriteSpec
from tvr.scaffold.ops import kv_write, rope

if TYPE_CHECKING:
    from torch import Tensor

# No "cuda_graph", because of kv_write.
BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        fields=frozenset({"rotary_dim"}),
        flags=frozenset({"deterministic"}),
    )
]


def bind(spec: RopeKvWriteSpec) -> BoundOp:
    """Return the op for heads of `spec.head_dim`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_out: Tensor,
    k_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """q, q_out [T, H, D]; k, v, k_out [T, KVH, D]; positions, slot_mapping [T] int64.

    k_out may be k, so the cache is filled from k_out, after the turn.
    """
    rope.run(q, k, positions, cos_sin_cache, q_out=q_out, k_out=k_out)
    kv_write.run(k_out, v, k_cache, v_cache, slot_mapping)
    return q_out, k_out
