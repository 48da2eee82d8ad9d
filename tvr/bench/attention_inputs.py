"""Inputs of attention: as many layers of one model as it takes to outgrow the L2 cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance.subject import Call
from tvr.conformance.tensors import torch_dtype
from tvr.contract import AttentionDecodeSpec, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.bench.buffers import Buffers
    from tvr.bench.cells import AttentionCell


def attention_calls(cell: AttentionCell, buffers: Buffers, num_sets: int) -> list[Call]:
    """Return one call for each of `num_sets` layers, in one and the same step.

    As in a model, layers have caches and queries of their own, and share the block table, whose
    blocks are in random order.
    """
    spec, dtype = cell.spec, torch_dtype(cell.spec.dtype)
    counts = [-(-n // spec.block_size) for n in cell.seq_lens]
    num_blocks = sum(counts)
    pool = (num_sets, 2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    caches = buffers.normal("kv", pool, dtype)
    rows = (num_sets, cell.num_tokens, spec.num_heads, spec.head_dim)
    q, out = buffers.normal("q", rows, dtype), buffers.unfilled("out", rows, dtype)
    order = torch.randperm(num_blocks, generator=buffers.generator, device=buffers.device)
    # [S, max_blocks]; what lies past the end of a shorter sequence is read by nobody
    table = torch.nn.utils.rnn.pad_sequence(
        list(torch.split(order.int(), counts)), batch_first=True
    )
    step = _step(cell, table)
    calls = []
    for s in range(num_sets):
        k_cache, v_cache = caches[s]
        args = {"q": q[s], "k_cache": k_cache, "v_cache": v_cache, "step": step}
        args |= {"scale": spec.head_dim**-0.5, "out": out[s], "lse": None}
        if not isinstance(spec, AttentionDecodeSpec):
            for name in ("k", "v"):  # this step's, which are all there are
                parts = [
                    tokens_of(args[f"{name}_cache"], ids, cell.ctx) for ids in step.block_table
                ]
                args[name] = torch.cat(parts)
        calls.append(Call(spec=spec, args=args))
    return calls


def tokens_of(cache: Tensor, block_ids: Tensor, num_tokens: int) -> Tensor:
    """Return a sequence's tokens [num_tokens, KVH, D] from a cache [blocks, KVH, bs, D]."""
    return cache[block_ids.long()].transpose(1, 2).flatten(0, 1)[:num_tokens]


def _step(cell: AttentionCell, block_table: Tensor) -> StepMeta:
    q_len = cell.num_tokens // cell.batch
    device = block_table.device
    return StepMeta(
        block_table=block_table,
        seq_lens=torch.tensor(cell.seq_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * q_len,
        num_seqs=cell.batch,
        num_tokens=cell.num_tokens,
        max_q_len=q_len,
        max_seq_len=cell.ctx,
        seq_lens_cpu=cell.seq_lens,
    )
