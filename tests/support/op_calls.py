"""Calls of ops with small tensors of common Llama shapes, to compile or time what they launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvr.contract import SPECS, BoundOp, Bounds, OpSpec, SamplingTables, StepMeta

Call = Callable[[BoundOp], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the calls; ops take what they know."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    hidden: int = 512
    width: int = 512
    vocab: int = 1024
    tokens: int = 5
    seqs: int = 3
    blocks: int = 8
    kv_len: int = 40
    chunk: int = 7
    rows: tuple[int, ...] = (1, 2, 8)


#: Triton takes an integer that is 1 for a constant, and compiles a kernel of its own.
ONES: dict[str, Any] = {
    **{name: 1 for name in ("heads", "kv_heads", "hidden", "width", "vocab", "tokens", "seqs")},
    **{name: 1 for name in ("blocks", "kv_len", "chunk")},
    "rows": (1,),
}


def calls(op: str, dtype: str, **sizes: Any) -> Iterator[tuple[OpSpec, Call]]:
    """Yield specs of `op` and calls of what a backend binds for them; `sizes` as in `Sizes`."""
    yield from globals()[f"_{op}"](getattr(torch, dtype), dtype, Sizes(**sizes))


def step(tokens_each: int, sizes: Sizes) -> StepMeta:
    """Sequences of `kv_len` tokens, the last `tokens_each` of them new."""
    seqs, kv_len = sizes.seqs, sizes.kv_len
    per_seq = -(-kv_len // sizes.block_size)
    table = torch.arange(seqs * per_seq, dtype=torch.int32).reshape(seqs, per_seq) % sizes.blocks
    return StepMeta(
        block_table=table,
        seq_lens=torch.full((seqs,), kv_len, dtype=torch.int32),
        cu_seqlens_q=torch.arange(seqs + 1, dtype=torch.int32) * tokens_each,
        num_seqs=seqs,
        num_tokens=seqs * tokens_each,
        max_q_len=tokens_each,
        max_seq_len=kv_len,
        seq_lens_cpu=[kv_len] * seqs,
    )


def _prepared(bound: BoundOp, meta: StepMeta) -> BoundOp:
    """Give the op its workspace and the step."""
    if bound.workspace_bytes is not None and bound.attach is not None:
        bounds = Bounds(
            max_num_seqs=meta.num_seqs,
            max_num_tokens=meta.num_tokens,
            max_seq_len=meta.max_seq_len,
            max_q_len=meta.max_q_len,
        )
        bound.attach(torch.zeros(bound.workspace_bytes(bounds), dtype=torch.uint8))
    if bound.plan is not None:
        bound.plan(meta)
    return bound


def _qkv(dtype: torch.dtype, s: Sizes, tokens: int) -> list[torch.Tensor]:
    qkv = torch.randn(tokens, (s.heads + 2 * s.kv_heads) * s.head_dim).to(dtype)
    split = [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim]
    return [part.view(tokens, -1, s.head_dim) for part in qkv.split(split, dim=1)]


def _caches(dtype: torch.dtype, s: Sizes) -> list[torch.Tensor]:
    shape = (s.blocks, s.kv_heads, s.block_size, s.head_dim)
    return [torch.randn(shape).to(dtype) for _ in range(2)]


def _heads(s: Sizes) -> dict[str, int]:
    return {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim}


def _rms_norm(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    x, weight = torch.randn(s.tokens, s.hidden).to(dtype), torch.ones(s.hidden, dtype=dtype)
    spec: Any = SPECS["rms_norm"]
    yield (
        spec(dtype=name, hidden_size=s.hidden),
        lambda bound: bound.run(x, weight, eps=1e-5, out=torch.empty_like(x)),
    )


def _add_rms_norm(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    x, weight = torch.randn(s.tokens, s.hidden).to(dtype), torch.ones(s.hidden, dtype=dtype)
    spec: Any = SPECS["add_rms_norm"]
    yield (
        spec(dtype=name, hidden_size=s.hidden),
        lambda bound: bound.run(
            x, x.clone(), weight, eps=1e-5, out=torch.empty_like(x), residual_out=x.clone()
        ),
    )


def _rope(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    q, k, _ = _qkv(dtype, s, s.tokens)
    angles = torch.randn(64, s.head_dim)
    spec: Any = SPECS["rope"]
    yield (
        spec(dtype=name, **_heads(s)),
        lambda bound: bound.run(q, k, torch.arange(s.tokens), angles, q_out=q, k_out=k),
    )


def _kv_write(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    _, k, v = _qkv(dtype, s, s.tokens)
    caches = _caches(dtype, s)
    spec: Any = SPECS["kv_write"]
    yield (
        spec(dtype=name, num_kv_heads=s.kv_heads, head_dim=s.head_dim, block_size=s.block_size),
        lambda bound: bound.run(k, v, *caches, torch.arange(s.tokens)),
    )


def _rope_kv_write(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    q, k, v = _qkv(dtype, s, s.tokens)
    caches = _caches(dtype, s)
    angles, tokens = torch.randn(64, s.head_dim), torch.arange(s.tokens)
    spec: Any = SPECS["rope_kv_write"]
    yield (
        spec(dtype=name, **_heads(s), block_size=s.block_size),
        lambda bound: bound.run(q, k, v, tokens, angles, *caches, tokens, q_out=q, k_out=k),
    )


def _attention_decode(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    meta = step(1, s)
    q, _, _ = _qkv(dtype, s, meta.num_tokens)
    caches = _caches(dtype, s)
    spec: Any = SPECS["attention_decode"]
    plain = spec(dtype=name, **_heads(s), block_size=s.block_size)

    def call(bound: BoundOp) -> object:
        run = _prepared(bound, meta).run
        lse = torch.empty(meta.num_tokens, s.heads)
        return run(q, *caches, meta, scale=0.1, out=torch.empty(q.shape, dtype=dtype), lse=lse)

    yield plain, call
    yield replace(plain, max_splits=2, return_lse=True), call


def _attention_prefill(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    meta = step(s.chunk, s)
    q, k, v = _qkv(dtype, s, meta.num_tokens)
    caches = _caches(dtype, s)
    spec: Any = SPECS["attention_prefill"]

    def call(bound: BoundOp) -> object:
        run = _prepared(bound, meta).run
        out = torch.empty(q.shape, dtype=dtype)
        return run(q, k, v, *caches, meta, scale=0.1, out=out)

    yield spec(dtype=name, **_heads(s), block_size=s.block_size), call


def _silu_mul(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    x = torch.randn(s.tokens, 2 * s.width).to(dtype)
    out = torch.empty(s.tokens, s.width, dtype=dtype)
    spec: Any = SPECS["silu_mul"]
    yield spec(dtype=name, intermediate_size=s.width), lambda bound: bound.run(x, out=out)


def _linear(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    spec: Any = SPECS["linear"]
    for width, rows in itertools.product((s.hidden, 8 * s.hidden), s.rows):
        x, weight = (torch.randn(n, width).to(dtype) for n in (rows, s.width))
        out = torch.empty(rows, s.width, dtype=dtype)

        def call(
            bound: BoundOp,
            x: torch.Tensor = x,
            weight: torch.Tensor = weight,
            out: torch.Tensor = out,
        ) -> object:
            packed = (weight, None) if bound.pack is None else bound.pack(weight, None)
            return _prepared(bound, step(1, s)).run(x, packed, out=out)

        yield spec(dtype=name, in_features=width, out_features=s.width, max_rows=8), call


def _fused_linear(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    """As in a decoder layer: qkv, o or down, gate and up."""
    spec: Any = SPECS["fused_linear"]
    kinds = ({"rms_norm": True}, {"add": True}, {"rms_norm": True, "silu_mul": True})
    for fused, width in itertools.product(kinds, (s.hidden, 8 * s.hidden)):
        bound_for = spec(
            dtype=name, in_features=width, out_features=2 * s.width, max_rows=1, **fused
        )
        x, weight = (torch.randn(n, width).to(dtype) for n in (1, 2 * s.width))
        given = {"out": torch.zeros(1, bound_for.out_columns, dtype=dtype)}
        if bound_for.rms_norm:
            given |= {"norm_weight": torch.ones(width, dtype=dtype), "eps": 1e-5}
        if bound_for.add:
            given["residual"] = given["out"]

        def call(
            bound: BoundOp,
            x: torch.Tensor = x,
            weight: torch.Tensor = weight,
            given: dict[str, Any] = given,
        ) -> object:
            packed = (weight, None) if bound.pack is None else bound.pack(weight, None)
            return _prepared(bound, step(1, s)).run(x, packed, **given)

        yield bound_for, call


def _argmax(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    logits, out = torch.randn(s.tokens, s.vocab).to(dtype), torch.empty(s.tokens, dtype=torch.int64)
    spec: Any = SPECS["argmax"]

    def call(bound: BoundOp) -> object:
        return _prepared(bound, step(1, s)).run(logits, out=out)

    yield spec(dtype=name, vocab_size=s.vocab), call


def _prepare_step(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    spec: Any = SPECS["prepare_step"]
    entries = torch.tensor([[row, s.kv_len - 1, -1] for row in range(s.seqs)], dtype=torch.int32)
    table = torch.zeros(s.seqs + 1, s.blocks, dtype=torch.int32)
    names = ("input_ids", "positions", "rows", "slot_mapping")
    outs = {n: torch.empty(s.seqs, dtype=torch.int64) for n in names}
    outs |= {"seq_lens": torch.empty(s.seqs, dtype=torch.int32), "step_block_table": table[:-1]}

    def call(bound: BoundOp) -> object:
        last_token = torch.zeros(s.seqs + 1, dtype=torch.int64)
        return bound.run(entries, table.clone(), last_token, **outs)

    yield spec(dtype=name, block_size=s.block_size), call


def _sample(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    meta, num_rows = step(1, s), s.seqs + 1
    logits = torch.randn(s.seqs, s.vocab).to(dtype)
    tables = SamplingTables(
        temperature=torch.full((num_rows,), 0.8),
        max_gap=torch.full((num_rows,), torch.inf),
        top_k=torch.full((num_rows,), 5),
        top_p=torch.full((num_rows,), 0.5, dtype=torch.float64),
        seeds=torch.arange(num_rows),
        repetition=torch.full((num_rows,), 1.5),
        presence=torch.zeros(num_rows),
        frequency=torch.zeros(num_rows),
        counts=torch.zeros(num_rows, s.vocab, dtype=torch.int16),
    )
    rows, last_token = torch.arange(s.seqs), torch.zeros(num_rows, dtype=torch.int64)
    spec: Any = SPECS["sample"]

    def call(bound: BoundOp) -> object:
        out = torch.empty(s.seqs, dtype=torch.int64)
        return _prepared(bound, meta).run(logits, rows, rows, tables, last_token, out=out)

    yield spec(dtype=name, vocab_size=s.vocab), call


def _top_logprobs(dtype: torch.dtype, name: str, s: Sizes) -> Iterator[tuple[OpSpec, Call]]:
    meta = step(1, s)
    logits, tokens = torch.randn(s.seqs, s.vocab).to(dtype), torch.arange(s.seqs) % s.vocab
    spec: Any = SPECS["top_logprobs"]
    num_top = min(20, s.vocab)

    def call(bound: BoundOp) -> object:
        ids = torch.empty(s.seqs, 1 + num_top, dtype=torch.int64)
        values, ranks = torch.empty(ids.shape), torch.empty(s.seqs, dtype=torch.int64)
        return _prepared(bound, meta).run(logits, tokens, ids=ids, values=values, ranks=ranks)

    yield spec(dtype=name, vocab_size=s.vocab, num_top=num_top), call
