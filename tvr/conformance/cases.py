"""The named cases as data.

Levels add up: "quick" runs those of "smoke" too. Smoke cases are small enough for a kernel
interpreter on a CPU: at most 8,000 elements a tile, kv_len at most 130.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tvr.conformance.case import LEVELS, Case
from tvr.contract import (
    DTYPES,
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SiluMulSpec,
)


def cases(op: str, level: str, seed: int = 0) -> list[Case]:
    """Return the named cases of `op` that `level` runs, their random numbers seeded by `seed`."""
    levels = LEVELS[: LEVELS.index(level) + 1]
    return [
        replace(case, seed=seed) for case in _all_cases() if case.op == op and case.level in levels
    ]


# (rows, hidden size)
_NORMS = {
    "smoke": [(5, 64), (3, 72), (3, 576), (1, 2048)],
    "quick": [(2, 128), (33, 256), (2, 3072), (2, 3584), (2, 4096), (2, 5120), (2, 8192)],
    "full": [(300, 4096), (2, 16384)],
}
# (tokens, query heads, KV heads, head_dim, rotary_dim)
_ROPES: dict[str, list[tuple[int, int, int, int, int | None]]] = {
    "smoke": [(7, 9, 3, 64, None), (3, 4, 1, 128, None), (5, 2, 2, 96, None), (4, 3, 1, 64, 32)],
    "quick": [(33, 32, 8, 128, None), (6, 71, 1, 64, None), (3, 2, 2, 72, None)],
    "full": [(515, 24, 8, 128, None)],
}
# (tokens, KV heads, head_dim, block_size)
_KV_WRITES = {
    "smoke": [(7, 3, 64, 16), (17, 1, 128, 8), (3, 2, 96, 32)],
    "quick": [(130, 8, 128, 16), (5, 4, 80, 1)],
    "full": [(2050, 8, 128, 16)],
}
# (query heads, KV heads, head_dim, block_size)
_HEADS = {
    "smoke": [(9, 3, 64, 16), (4, 4, 64, 16), (6, 1, 128, 16), (4, 2, 96, 32)],
    "quick": [
        *((h, kvh, 128, 16) for h, kvh in ((8, 8), (8, 4), (24, 8), (32, 8), (20, 4), (28, 4))),
        *((h, kvh, 64, 16) for h, kvh in ((64, 8), (64, 4), (71, 1))),
        (2, 1, 64, 1),
        (2, 1, 256, 64),
    ],
}
# Decode: kv_lens. Block edges, one key, an empty row, and equal neighbours.
_DECODES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {"edges": (1, 15, 16, 17, 130), "empty": (0, 7, 0, 16), "twins": (1, 1)},
    "quick": {"ragged": (513, 2, 255, 1025)},
    "full": {"long": (4090, 1, 8192)},
}
# Prefill: (q_lens, kv_lens). Whole prompts, chunks behind a prefix, padding rows, more rows than
# keys.
_PREFILLS: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "smoke": {
        "prompts": ((1, 16, 5, 33), (1, 16, 5, 33)),
        "chunks": ((8, 40, 1, 2), (40, 40, 17, 130)),
        "padding": ((0, 1, 0, 1, 2), (0, 3, 0, 5, 0)),
        "keyless": ((5, 2), (2, 2)),
    },
    "quick": {"ragged": ((130, 3, 300), (130, 515, 300))},
    "full": {"long": ((129, 1025), (4096, 1025))},
}
# Fields away from their neutral value, tried on one geometry each.
_FIELDS: dict[str, dict[str, object]] = {
    "lse": {"return_lse": True},
    "window": {"window": 5, "return_lse": True},
    "softcap": {"softcap": 2.0, "return_lse": True},
    "full-mask": {"causal": False, "return_lse": True},
    "splits": {"max_splits": 3},
}


def _all_cases() -> Iterator[Case]:
    yield from _row_cases()
    yield from _token_cases()
    yield from _attention_cases()


def _row_cases() -> Iterator[Case]:
    for (level, shapes), dtype in itertools.product(_NORMS.items(), DTYPES):
        for rows, hidden in shapes:
            for spec_type in (RmsNormSpec, AddRmsNormSpec):
                spec = spec_type(dtype=dtype, hidden_size=hidden)
                yield _case(spec, f"{rows}x{hidden}", level=level, num_tokens=rows)
    for dtype in DTYPES:
        for rows, width in ((1, 64), (5, 72), (3, 1536)):
            silu = SiluMulSpec(dtype=dtype, intermediate_size=width)
            yield _case(silu, f"{rows}x{width}", num_tokens=rows)
        for rows, vocab in ((1, 64), (6, 1000), (2, 4099)):
            argmax = ArgmaxSpec(dtype=dtype, vocab_size=vocab)
            yield _case(argmax, f"{rows}x{vocab}", num_tokens=rows)
        yield _case(
            ArgmaxSpec(dtype=dtype, vocab_size=128256), "3x128256", level="quick", num_tokens=3
        )
        for rows, n_in, n_out in ((1, 64, 96), (5, 576, 40), (2, 72, 5)):
            for bias in (False, True):
                linear = LinearSpec(
                    dtype=dtype, in_features=n_in, out_features=n_out, bias=bias, max_rows=8
                )
                detail = f"{rows}x{n_in}x{n_out}" + "-bias" * bias
                yield _case(linear, detail, num_tokens=rows)
        for rows in (1, 8, 17, 130):
            linear = LinearSpec(dtype=dtype, in_features=1536, out_features=576)
            yield _case(linear, f"{rows}x1536x576", level="quick", num_tokens=rows)


def _token_cases() -> Iterator[Case]:
    for (level, ropes), dtype in itertools.product(_ROPES.items(), DTYPES):
        for tokens, heads, kv_heads, dim, rotary_dim in ropes:
            shape: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
            detail = f"{tokens}x{heads}-{kv_heads}x{dim}" + f"-{rotary_dim}" * bool(rotary_dim)
            rope = RopeSpec(dtype=dtype, rotary_dim=rotary_dim, **shape)
            yield _case(rope, detail, level=level, num_tokens=tokens)
            both = RopeKvWriteSpec(dtype=dtype, rotary_dim=rotary_dim, block_size=16, **shape)
            yield _case(both, detail, level=level, num_tokens=tokens)
    for (level, writes), dtype in itertools.product(_KV_WRITES.items(), DTYPES):
        for tokens, kv_heads, dim, block_size in writes:
            write = KvWriteSpec(
                dtype=dtype, num_kv_heads=kv_heads, head_dim=dim, block_size=block_size
            )
            detail = f"{tokens}x{kv_heads}x{dim}-block{block_size}"
            yield _case(write, detail, level=level, num_tokens=tokens)
    narrow = KvWriteSpec(
        dtype="float32", num_kv_heads=2, head_dim=64, block_size=16, kv_dtype="float16"
    )
    yield _case(narrow, "5x2x64-into-float16", num_tokens=5)


def _attention_cases() -> Iterator[Case]:
    for level, dtype in itertools.product(LEVELS, DTYPES):
        for heads, kv_heads, dim, block_size in _HEADS.get(level, ()):
            shape = _shape(dtype, heads, kv_heads, dim, block_size)
            detail = f"{heads}-{kv_heads}x{dim}-block{block_size}"
            decode = AttentionDecodeSpec(**shape)
            yield _case(decode, detail, level=level, q_lens=(1, 1), kv_lens=(33, 5))
            prefill = AttentionPrefillSpec(**shape)
            yield _case(prefill, detail, level=level, q_lens=(3, 17), kv_lens=(33, 17))
        shape = _shape(dtype, 9, 3, 64, 16)
        for detail, kv_lens in _DECODES.get(level, {}).items():
            q_lens = (1,) * len(kv_lens)
            decode = AttentionDecodeSpec(**shape)
            yield _case(decode, detail, level=level, q_lens=q_lens, kv_lens=kv_lens)
        for detail, (q_lens, kv_lens) in _PREFILLS.get(level, {}).items():
            prefill = AttentionPrefillSpec(**shape)
            yield _case(prefill, detail, level=level, q_lens=q_lens, kv_lens=kv_lens)
    for dtype in DTYPES:
        fields = dict(_FIELDS)
        if dtype == "float32":
            fields["float16-cache"] = {"kv_dtype": "float16"}
        for detail, values in fields.items():
            shape = _shape(dtype, 6, 2, 64, 16) | values
            q_lens, kv_lens = (1, 1, 1, 1, 1), (33, 0, 16, 5, 6)  # 5: exactly the window
            yield _case(AttentionDecodeSpec(**shape), detail, q_lens=q_lens, kv_lens=kv_lens)
            q_lens, kv_lens = (3, 5, 2, 9), (33, 2, 0, 9)
            yield _case(AttentionPrefillSpec(**shape), detail, q_lens=q_lens, kv_lens=kv_lens)


def _shape(dtype: str, heads: int, kv_heads: int, dim: int, block_size: int) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "block_size": block_size,
    }


def _case(spec: OpSpec, detail: str, **sizes: Any) -> Case:  # noqa: ANN401
    return Case(name=f"{spec.op}-{detail}-{spec.dtype}", spec=spec, **sizes)
