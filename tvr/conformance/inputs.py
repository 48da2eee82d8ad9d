"""Random inputs of a case, rounded to its dtype, laid out as core lays them out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.subject import Call
from tvr.contract import (
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionPrefillSpec,
    AttentionSpec,
    KvWriteSpec,
    LinearSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SiluMulSpec,
    StepMeta,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.cases import Case

EPS = 1e-5  # of the norms
MAX_POSITION = 512
SPARE_BLOCKS = 3
_ROPE_THETA = 10000.0


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_call(case: Case, device: torch.device) -> Call:
    """Return the case's call with ordinary random inputs and NaN-filled outputs."""
    if isinstance(case.spec, AttentionSpec):
        return attention_call(case, random_sequences(case), device)
    g, dtype, rows = case.generator(), torch_dtype(case.spec.dtype), case.num_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(device)

    def empty(*shape: int) -> Tensor:
        return _nan(*shape, dtype=dtype, device=device)

    match case.spec:
        case AddRmsNormSpec(hidden_size=n):
            x, residual, weight = normal(rows, n), normal(rows, n), 1 + normal(n) / 4
            args = {"x": x, "residual": residual, "weight": weight, "eps": EPS}
            args |= {"out": empty(rows, n), "residual_out": empty(rows, n)}
        case RmsNormSpec(hidden_size=n):
            args = {"x": normal(rows, n), "weight": 1 + normal(n) / 4, "eps": EPS}
            args |= {"out": empty(rows, n)}
        case RopeSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim):
            args = {"q": normal(rows, heads, dim), "k": normal(rows, kv_heads, dim)}
            args["positions"] = torch.randint(MAX_POSITION, (rows,), generator=g).to(device)
            args["cos_sin_cache"] = cos_sin_cache(case.spec.rotary_dim or dim).to(device)
            args |= {"q_out": empty(rows, heads, dim), "k_out": empty(rows, kv_heads, dim)}
            if isinstance(case.spec, RopeKvWriteSpec):
                args["v"] = normal(rows, kv_heads, dim)
                args |= _cache_args(case.spec, rows, g, device)
        case KvWriteSpec(num_kv_heads=kv_heads, head_dim=dim):
            args = {"k": normal(rows, kv_heads, dim), "v": normal(rows, kv_heads, dim)}
            args |= _cache_args(case.spec, rows, g, device)
        case SiluMulSpec(intermediate_size=n):
            args = {"x": 3 * normal(rows, 2 * n), "out": empty(rows, n)}
        case LinearSpec(in_features=n_in, out_features=n_out, bias=bias):
            args = {"x": normal(rows, n_in), "weight": normal(n_out, n_in)}
            args |= {"bias": normal(n_out) if bias else None, "out": empty(rows, n_out)}
        case ArgmaxSpec(vocab_size=n):
            args = {"logits": normal(rows, n), "out": torch.full((rows,), -7, device=device)}
        case _:
            raise NotImplementedError(case.op)
    return Call(spec=case.spec, args=args)


def cos_sin_cache(rotary_dim: int) -> Tensor:
    """Return the table [MAX_POSITION, rotary_dim] fp32: cos half, then sin half."""
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64)
    frequency = _ROPE_THETA ** (-2 * pair / rotary_dim)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64).unsqueeze(1) * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def _cache_args(
    spec: KvWriteSpec | RopeKvWriteSpec, rows: int, g: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Caches full of random numbers and a distinct random slot for each row."""
    num_blocks = -(-rows // spec.block_size) + SPARE_BLOCKS
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    kv_dtype = torch_dtype(spec.kv_dtype or spec.dtype)
    k_cache, v_cache = (torch.randn(shape, generator=g).to(kv_dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * spec.block_size, generator=g)[:rows]
    return {
        "k_cache": k_cache.to(device),
        "v_cache": v_cache.to(device),
        "slot_mapping": slots.to(device),
    }


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
        "out": _nan(num_tokens, spec.num_heads, spec.head_dim, dtype=dtype, device=device),
        "lse": None,
    }
    if isinstance(spec, AttentionPrefillSpec):
        args["k"] = _new_rows(sequences.k, q_lens, dtype).to(device)
        args["v"] = _new_rows(sequences.v, q_lens, dtype).to(device)
    if spec.return_lse:
        args["lse"] = _nan(num_tokens, spec.num_heads, dtype=torch.float32, device=device)
    return Call(spec=spec, args=args)


def _nan(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _block_table(kv_lens: list[int], block_size: int, paging: Paging) -> tuple[Tensor, int]:
    """Return a table with a column to spare, and the number of blocks in the pool."""
    counts = [-(-n // block_size) for n in kv_lens]
    num_blocks = sum(counts) + SPARE_BLOCKS
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
        for j in range(len(k)):
            block, offset = int(table[s, j // spec.block_size]), j % spec.block_size
            k_cache[block, :, offset] = k[j]
            v_cache[block, :, offset] = v[j]
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
