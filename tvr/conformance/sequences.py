"""What an attention case attends to, and how it is laid out in a paged cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.subject import Call
from tvr.conformance.tensors import torch_dtype, unfilled
from tvr.contract import AttentionPrefillSpec, AttentionSpec, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case

_SPARE_BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What a case attends to, before it is paged; on the CPU.

    Attributes:
        q: [q_len, H, D] of each sequence.
        k, v: [kv_len, KVH, D] of each sequence, in the cache's dtype.
        scale: multiplies the scores.
    """

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    scale: float


@dataclass(frozen=True, kw_only=True)
class Paging:
    """How `attention_call` lays sequences out; the result must not depend on any of it.

    Attributes:
        block_seed: which physical blocks are taken, in which order.
        k_unused, v_unused: value of cache slots that belong to no token.
        table_end: block id in table entries past a sequence's end.
        interleaved: K and V of a block lie side by side, so that the block stride doubles.
    """

    block_seed: int = 0
    k_unused: float = 3.0
    v_unused: float = -5.0
    table_end: int = 0
    interleaved: bool = False


DEFAULT_PAGING = Paging()


def attention_spec(case: Case) -> AttentionSpec:
    """Return the case's spec, known to be one of attention."""
    assert isinstance(case.spec, AttentionSpec)
    return case.spec


def random_sequences(case: Case) -> Sequences:
    """Return normal random q, k and v."""
    spec, g = attention_spec(case), case.generator()
    dtype, kv_dtype = torch_dtype(spec.dtype), torch_dtype(spec.kv_dtype or spec.dtype)

    def normal(length: int, heads: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(length, heads, spec.head_dim, generator=g).to(dtype)

    return Sequences(
        q=[normal(n, spec.num_heads, dtype) for n in case.q_lens],
        k=[normal(n, spec.num_kv_heads, kv_dtype) for n in case.kv_lens],
        v=[normal(n, spec.num_kv_heads, kv_dtype) for n in case.kv_lens],
        scale=spec.head_dim**-0.5,
    )


def attention_call(
    case: Case, sequences: Sequences, device: torch.device, paging: Paging = DEFAULT_PAGING
) -> Call:
    """Return the call that attends to `sequences`, paged as `paging` says."""
    spec = attention_spec(case)
    q_lens = [len(q) for q in sequences.q]
    kv_lens = [len(k) for k in sequences.k]
    table, num_blocks = _block_table(kv_lens, spec.block_size, paging)
    k_cache, v_cache = _paged(spec, sequences, table, num_blocks, paging)
    cu_seqlens_q = [0, *itertools.accumulate(q_lens)]
    dtype = torch_dtype(spec.dtype)
    num_tokens = sum(q_lens)
    if paging.interleaved:  # [blocks, 2, KVH, block_size, D]
        k_cache, v_cache = torch.stack([k_cache, v_cache], dim=1).to(device).unbind(1)
    args: dict[str, Any] = {
        "q": torch.cat(sequences.q).to(device),
        "k_cache": k_cache.to(device),
        "v_cache": v_cache.to(device),
        "step": StepMeta(
            block_table=table.to(device),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32, device=device),
            num_seqs=len(kv_lens),
            num_tokens=num_tokens,
            max_q_len=max(q_lens),
            max_seq_len=max(kv_lens),
            seq_lens_cpu=kv_lens,
        ),
        "scale": sequences.scale,
        "out": unfilled(num_tokens, spec.num_heads, spec.head_dim, dtype=dtype, device=device),
        "lse": None,
    }
    if isinstance(spec, AttentionPrefillSpec):
        args["k"] = _new_rows(sequences.k, q_lens, dtype).to(device)
        args["v"] = _new_rows(sequences.v, q_lens, dtype).to(device)
    if spec.return_lse:
        args["lse"] = unfilled(num_tokens, spec.num_heads, dtype=torch.float32, device=device)
    return Call(spec=spec, args=args)


def _block_table(kv_lens: list[int], block_size: int, paging: Paging) -> tuple[Tensor, int]:
    """Return a table with a column to spare, and the number of blocks in the pool."""
    counts = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(counts) + _SPARE_BLOCKS
    g = torch.Generator().manual_seed(paging.block_seed)
    ids = iter(torch.randperm(num_blocks, generator=g).tolist())
    table = torch.full((len(kv_lens), max(counts) + 1), paging.table_end, dtype=torch.int32)
    for s, count in enumerate(counts):
        table[s, :count] = torch.tensor(list(itertools.islice(ids, count)), dtype=torch.int32)
    return table, num_blocks


def _paged(
    spec: AttentionSpec, sequences: Sequences, table: Tensor, num_blocks: int, paging: Paging
) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    kv_dtype = torch_dtype(spec.kv_dtype or spec.dtype)
    k_cache = torch.full(shape, paging.k_unused, dtype=kv_dtype)
    v_cache = torch.full(shape, paging.v_unused, dtype=kv_dtype)
    for s, (k, v) in enumerate(zip(sequences.k, sequences.v, strict=True)):
        token = torch.arange(len(k))
        block, offset = table[s, token // spec.block_size].long(), token % spec.block_size
        k_cache[block, :, offset] = k
        v_cache[block, :, offset] = v
    return k_cache, v_cache


def _new_rows(kv: list[Tensor], q_lens: list[int], dtype: torch.dtype) -> Tensor:
    """Return the last q_len rows of each sequence; zeros where it has fewer."""
    rows = []
    for x, q_len in zip(kv, q_lens, strict=True):
        new = torch.zeros(q_len, *x.shape[1:], dtype=dtype)
        given = min(q_len, len(x))
        new[q_len - given :] = x[len(x) - given :]
        rows.append(new)
    return torch.cat(rows)
