"""Calls of ops with tensors of common Llama shapes, to compile or time what they launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tvr.contract import SPECS, BoundOp, Bounds, OpSpec, StepMeta

Call = Callable[[BoundOp], object]

HEADS, KV_HEADS, HIDDEN, WIDTH, VOCAB = 8, 2, 512, 512, 1024
TOKENS, SEQS, BLOCKS = 5, 3, 8


def calls(
    op: str, dtype: str, *, head_dim: int = 64, block_size: int = 16
) -> Iterator[tuple[OpSpec, Call]]:
    """Yield specs of `op` and calls of what a backend binds for them."""
    make = globals()[f"_{op}"]
    yield from make(getattr(torch, dtype), dtype, head_dim, block_size)


def step(tokens_each: int, block_size: int, kv_len: int = 40) -> StepMeta:
    """SEQS sequences of `kv_len` tokens, the last `tokens_each` of them new."""
    per_seq = -(-kv_len // block_size)
    table = torch.arange(SEQS * per_seq, dtype=torch.int32).reshape(SEQS, per_seq) % BLOCKS
    return StepMeta(
        block_table=table,
        seq_lens=torch.full((SEQS,), kv_len, dtype=torch.int32),
        cu_seqlens_q=torch.arange(SEQS + 1, dtype=torch.int32) * tokens_each,
        num_seqs=SEQS,
        num_tokens=SEQS * tokens_each,
        max_q_len=tokens_each,
        max_seq_len=kv_len,
        seq_lens_cpu=[kv_len] * SEQS,
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


def _qkv(dtype: torch.dtype, head_dim: int, tokens: int) -> list[torch.Tensor]:
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    sizes = [HEADS * head_dim, KV_HEADS * head_dim, KV_HEADS * head_dim]
    return [part.view(tokens, -1, head_dim) for part in qkv.split(sizes, dim=1)]


def _caches(dtype: torch.dtype, head_dim: int, block_size: int) -> list[torch.Tensor]:
    return [torch.randn(BLOCKS, KV_HEADS, block_size, head_dim).to(dtype) for _ in range(2)]


def _rms_norm(dtype: torch.dtype, name: str, *_: Any) -> Iterator[tuple[OpSpec, Call]]:
    x, weight = torch.randn(TOKENS, HIDDEN).to(dtype), torch.ones(HIDDEN, dtype=dtype)
    spec = SPECS["rms_norm"](dtype=name, hidden_size=HIDDEN)  # type: ignore[call-arg]
    yield spec, lambda bound: bound.run(x, weight, eps=1e-5, out=torch.empty_like(x))


def _add_rms_norm(dtype: torch.dtype, name: str, *_: Any) -> Iterator[tuple[OpSpec, Call]]:
    x, weight = torch.randn(TOKENS, HIDDEN).to(dtype), torch.ones(HIDDEN, dtype=dtype)
    spec = SPECS["add_rms_norm"](dtype=name, hidden_size=HIDDEN)  # type: ignore[call-arg]
    yield (
        spec,
        lambda bound: bound.run(
            x, x.clone(), weight, eps=1e-5, out=torch.empty_like(x), residual_out=x.clone()
        ),
    )


def _rope(
    dtype: torch.dtype, name: str, head_dim: int, block_size: int
) -> Iterator[tuple[OpSpec, Call]]:
    q, k, _ = _qkv(dtype, head_dim, TOKENS)
    angles = torch.randn(64, head_dim)
    spec: Any = SPECS["rope"]
    yield (
        spec(dtype=name, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_dim),
        lambda bound: bound.run(q, k, torch.arange(TOKENS), angles, q_out=q, k_out=k),
    )


def _kv_write(
    dtype: torch.dtype, name: str, head_dim: int, block_size: int
) -> Iterator[tuple[OpSpec, Call]]:
    _, k, v = _qkv(dtype, head_dim, TOKENS)
    caches = _caches(dtype, head_dim, block_size)
    spec: Any = SPECS["kv_write"]
    yield (
        spec(dtype=name, num_kv_heads=KV_HEADS, head_dim=head_dim, block_size=block_size),
        lambda bound: bound.run(k, v, *caches, torch.arange(TOKENS)),
    )


def _rope_kv_write(
    dtype: torch.dtype, name: str, head_dim: int, block_size: int
) -> Iterator[tuple[OpSpec, Call]]:
    q, k, v = _qkv(dtype, head_dim, TOKENS)
    caches = _caches(dtype, head_dim, block_size)
    angles, tokens = torch.randn(64, head_dim), torch.arange(TOKENS)
    spec: Any = SPECS["rope_kv_write"]
    yield (
        spec(
            dtype=name,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=head_dim,
            block_size=block_size,
        ),
        lambda bound: bound.run(q, k, v, tokens, angles, *caches, tokens, q_out=q, k_out=k),
    )


def _attention_decode(
    dtype: torch.dtype, name: str, head_dim: int, block_size: int
) -> Iterator[tuple[OpSpec, Call]]:
    meta = step(1, block_size)
    q, _, _ = _qkv(dtype, head_dim, meta.num_tokens)
    caches = _caches(dtype, head_dim, block_size)
    spec: Any = SPECS["attention_decode"]
    plain = spec(
        dtype=name, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=head_dim, block_size=block_size
    )

    def call(bound: BoundOp) -> object:
        run = _prepared(bound, meta).run
        lse = torch.empty(meta.num_tokens, HEADS)
        return run(q, *caches, meta, scale=0.1, out=torch.empty(q.shape, dtype=dtype), lse=lse)

    yield plain, call
    yield replace(plain, max_splits=2, return_lse=True), call


def _attention_prefill(
    dtype: torch.dtype, name: str, head_dim: int, block_size: int
) -> Iterator[tuple[OpSpec, Call]]:
    meta = step(7, block_size)
    q, k, v = _qkv(dtype, head_dim, meta.num_tokens)
    caches = _caches(dtype, head_dim, block_size)
    spec: Any = SPECS["attention_prefill"]

    def call(bound: BoundOp) -> object:
        run = _prepared(bound, meta).run
        out = torch.empty(q.shape, dtype=dtype)
        return run(q, k, v, *caches, meta, scale=0.1, out=out)

    yield (
        spec(
            dtype=name,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=head_dim,
            block_size=block_size,
        ),
        call,
    )


def _silu_mul(dtype: torch.dtype, name: str, *_: Any) -> Iterator[tuple[OpSpec, Call]]:
    x = torch.randn(TOKENS, 2 * WIDTH).to(dtype)
    out = torch.empty(TOKENS, WIDTH, dtype=dtype)
    spec = SPECS["silu_mul"](dtype=name, intermediate_size=WIDTH)  # type: ignore[call-arg]
    yield spec, lambda bound: bound.run(x, out=out)


def _linear(dtype: torch.dtype, name: str, *_: Any) -> Iterator[tuple[OpSpec, Call]]:
    weight = torch.randn(WIDTH, HIDDEN).to(dtype)
    spec: Any = SPECS["linear"]
    for rows in (1, 2, 8):
        x = torch.randn(rows, HIDDEN).to(dtype)
        out = torch.empty(rows, WIDTH, dtype=dtype)

        def call(bound: BoundOp, x: torch.Tensor = x, out: torch.Tensor = out) -> object:
            packed = (weight, None) if bound.pack is None else bound.pack(weight, None)
            return _prepared(bound, step(1, 16)).run(x, packed, out=out)

        yield spec(dtype=name, in_features=HIDDEN, out_features=WIDTH, max_rows=8), call


def _argmax(dtype: torch.dtype, name: str, *_: Any) -> Iterator[tuple[OpSpec, Call]]:
    logits, out = torch.randn(TOKENS, VOCAB).to(dtype), torch.empty(TOKENS, dtype=torch.int64)
    spec = SPECS["argmax"](dtype=name, vocab_size=VOCAB)  # type: ignore[call-arg]

    def call(bound: BoundOp) -> object:
        return _prepared(bound, step(1, 16)).run(logits, out=out)

    yield spec, call
