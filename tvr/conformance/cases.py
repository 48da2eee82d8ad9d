"""The named cases as data.

Levels add up: "quick" runs those of "smoke" too. Smoke cases are small enough for a kernel
interpreter on a CPU: at most 8,000 elements a tile, kv_len at most 130.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from tvr.conformance.case import LEVELS, Case
from tvr.conformance.cases_fused import fused_cases
from tvr.conformance.model_cases import engine_cases
from tvr.conformance.model_spec import ENGINE
from tvr.contract import (
    DTYPES,
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    PrepareStepSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SampleSpec,
    SiluMulSpec,
    TopLogprobsSpec,
)


def cases(op: str, level: str, seed: int = 0) -> list[Case]:
    """Return the named cases that `level` runs of `op`, or of "engine", with this seed."""
    if op in ENGINE:
        return engine_cases(level, seed)
    levels = LEVELS[: LEVELS.index(level) + 1]
    return [replace(case, seed=seed) for case in _cases_of(op) if case.level in levels]


# (rows, hidden size)
_NORMS = {
    "smoke": [(5, 64), (3, 72), (3, 576), (1, 2048)],
    "quick": [(2, 128), (33, 256), (2, 3072), (2, 3584), (2, 4096), (2, 5120), (2, 8192)],
    "full": [(300, 4096), (2, 16384)],
}
# (rows, intermediate size)
_SILUS = {"smoke": [(1, 64), (5, 72), (3, 1536)], "quick": [(2, 8192), (17, 14336)]}
# (rows, vocabulary)
_ARGMAXES = {"smoke": [(1, 64), (6, 1000), (2, 4099)], "quick": [(3, 128256)]}
# (sequences, block_size); the tables of smaller blocks have more columns
_PREPARES = {"smoke": [(1, 16), (5, 16), (7, 1)], "quick": [(256, 16), (33, 64), (9, 256)]}
# (rows, vocabulary)
_SAMPLES = {"smoke": [(1, 64), (10, 1000), (3, 4099)], "quick": [(10, 128256), (300, 130)]}
# (rows, vocabulary, most of the likeliest)
_LOGPROBS = {
    "smoke": [(1, 64, 5), (6, 1000, 20), (2, 4099, 1), (3, 20, 20)],
    "quick": [(3, 128256, 20), (300, 130, 5), (5, 131, 32)],
    "full": [(256, 128256, 5)],
}
# (rows, in, out, max_rows)
_LINEARS: dict[str, list[tuple[int, int, int, int | None]]] = {
    "smoke": [(1, 64, 96, 8), (5, 576, 40, 8), (2, 72, 5, 8)],
    "quick": [(rows, 1536, 576, None) for rows in (1, 8, 17, 130)],
}
# (tokens, query heads, KV heads, head_dim, rotary_dim)
_ROPES: dict[str, list[tuple[int, int, int, int, int | None]]] = {
    "smoke": [(7, 9, 3, 64, None), (3, 4, 1, 128, None), (5, 2, 2, 96, None), (4, 3, 1, 64, 32)],
    "quick": [
        *((33, 32, 8, 128, None), (7, 24, 8, 128, None), (6, 71, 1, 64, None)),
        *((3, 2, 2, 72, None), (3, 2, 1, 80, None), (3, 2, 1, 256, None), (5, 2, 1, 128, 64)),
    ],
    "full": [(515, 24, 8, 128, None)],
}
# (tokens, KV heads, head_dim, block_size); the small ones of more than "smoke" are tried in far
# corners of huge pools too
_KV_WRITES = {
    "smoke": [(7, 3, 64, 16), (17, 1, 128, 8), (3, 2, 96, 32)],
    "quick": [(130, 8, 128, 16), (5, 4, 80, 1), (9, 2, 256, 128), (70, 2, 64, 256), (4, 1, 64, 16)],
    "full": [(2050, 8, 128, 16), (3, 1, 64, 16)],
}
# (query heads, KV heads, head_dim, block_size)
_HEADS = {
    "smoke": [(9, 3, 64, 16), (4, 4, 64, 16)],
    "full": [
        (2 * group, 2, head_dim, block_size)
        for group in (1, 3, 8, 16)
        for head_dim in (64, 80, 96, 128, 256)
        for block_size in (32, 64, 128, 256)
    ],
}
# The same, by turns: each in one dtype at its level, and in the others at "full".
_HEADS_BY_TURNS = {
    "smoke": [(6, 1, 128, 16), (4, 2, 96, 32), (2, 1, 80, 16), (2, 1, 256, 16)],
    "quick": [
        *((h, kvh, 128, 16) for h, kvh in ((8, 8), (8, 4), (24, 8), (32, 8), (20, 4), (24, 4))),
        *((h, kvh, 128, 16) for h, kvh in ((28, 4), (64, 8), (64, 4), (71, 1), (32, 32))),
        *((2 * group, 2, 64, 16) for group in range(1, 17)),
    ],
}
# Block sizes tried at every edge of their blocks, by turns; 1 and 8 are for whoever declares them.
_BLOCK_SIZES = [16, 32, 64, 128, 256, 1, 8]
# Decode: kv_lens. One key, block edges and what tiles and splits may end at, empty rows.
_DECODES: dict[str, dict[str, tuple[int, ...]]] = {
    "smoke": {
        "edges": (1, 15, 16, 17, 130),
        "empty": (0, 7, 0, 16),
        "nothing": (0, 0, 0),
        "even": (16, 0, 15, 17, 16),
        "twins": (1, 1),
    },
    "quick": {
        "ragged": (513, 2, 255, 1025),
        "tile-edges": tuple(2**i + step for i in range(6, 11) for step in (-1, 0, 1)),
    },
    "full": {"long": (4090, 1, 15, 16, 17, 8192)},
}
# Prefill: (q_lens, kv_lens). Whole prompts, chunks behind a prefix, single rows, padding rows, more
# rows than keys.
_PREFILLS: dict[str, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "smoke": {
        "prompts": ((1, 16, 5, 33), (1, 16, 5, 33)),
        "chunks": ((8, 40, 1, 2), (40, 40, 17, 130)),
        "two-of-five": ((2,), (5,)),
        "padding": ((0, 1, 0, 1, 2), (0, 3, 0, 5, 0)),
        "keyless": ((5, 2), (2, 2)),
    },
    "quick": {
        "in-16s": ((16, 16, 8), (16, 32, 40)),
        "single": ((1, 1, 1, 1), (20, 20, 20, 1)),
        "ragged": ((130, 3, 300), (130, 515, 300)),
    },
    "full": {
        "batch-64": (tuple(s % 4 for s in range(64)), tuple(5 * s % 67 for s in range(64))),
        "long": ((129, 1025, 3, 2), (4096, 1025, 15, 4090)),
        "prompt-2048": ((2048,), (2048,)),
    },
}
# The longest contexts, with few heads: (q_len, kv_len).
_CONTEXTS = {"65537": (2, 65537), "131072": (3, 131072)}
# Small enough for the far corners of huge pools: (q_len, kv_len).
_ONE_BLOCK = {"quick": (3, 15), "full": (2, 16)}
# Fields away from their neutral value, tried on one geometry each.
_FIELDS: dict[str, dict[str, dict[str, object]]] = {
    "smoke": {
        "lse": {"return_lse": True},
        "window": {"window": 5, "return_lse": True},
        "softcap": {"softcap": 2.0, "return_lse": True},
        "full-mask": {"causal": False, "return_lse": True},
        "splits": {"max_splits": 3},
    },
    "quick": {
        "window-1": {"window": 1},
        "window-4": {"window": 4},
        "window-in-splits": {"window": 20, "softcap": 30.0, "max_splits": 2},
    },
}
# Far more rows than a tile, a launch or a scratch buffer may have been made for, and one more.
_MANY_ROWS = 2049
_BATCHES = {
    "batch-64": tuple(1 + 7 * s % 130 for s in range(64)),
    "batch-256": tuple(5 * s % 37 for s in range(256)),
}
_HALF_DTYPES = ("float16", "bfloat16")
# What an interpreter on a CPU can do, and is slow at: of cases alike each has its own at "smoke".
_SHARING = ("float16", "float32")


@cache  # asked for at every check, and always the same
def _cases_of(op: str) -> tuple[Case, ...]:
    """Return all named cases of `op`."""
    every = itertools.chain(
        _row_cases(),
        _token_cases(),
        _attention_cases(),
        _batch_invariant_cases(),
        _many_rows_cases(),
        _row_table_cases(),
        fused_cases(),
    )
    return tuple(case for case in every if case.op == op)


def _row_cases() -> Iterator[Case]:
    for dtype, level in itertools.product(DTYPES, LEVELS):
        for rows, hidden in _NORMS[level]:
            for spec_type in (RmsNormSpec, AddRmsNormSpec):
                spec = spec_type(dtype=dtype, hidden_size=hidden)
                yield _case(spec, f"{rows}x{hidden}", level=level, num_tokens=rows)
        for rows, width in _SILUS.get(level, ()):
            silu = SiluMulSpec(dtype=dtype, intermediate_size=width)
            yield _case(silu, f"{rows}x{width}", level=level, num_tokens=rows)
        for rows, vocab in _ARGMAXES.get(level, ()):
            argmax = ArgmaxSpec(dtype=dtype, vocab_size=vocab)
            yield _case(argmax, f"{rows}x{vocab}", level=level, num_tokens=rows)
        for rows, vocab, num_top in _LOGPROBS[level]:
            logprobs = TopLogprobsSpec(dtype=dtype, vocab_size=vocab, num_top=num_top)
            yield _case(logprobs, f"{rows}x{vocab}-{num_top}", level=level, num_tokens=rows)
        for rows, n_in, n_out, max_rows in _LINEARS.get(level, ()):
            for bias in (False, True) if level == "smoke" else (False,):
                linear = LinearSpec(
                    dtype=dtype, in_features=n_in, out_features=n_out, bias=bias, max_rows=max_rows
                )
                detail = f"{rows}x{n_in}x{n_out}" + "-bias" * bias
                yield _case(linear, detail, level=level, num_tokens=rows)
    for dtype in _HALF_DTYPES:
        sizes: dict[str, Any] = {"in_features": 72, "out_features": 40, "max_rows": 8}
        wide = LinearSpec(dtype=dtype, **sizes, bias=True, out_dtype="float32")
        yield _case(wide, "3x72x40-to-float32", num_tokens=3)


def _token_cases() -> Iterator[Case]:
    for dtype, level in itertools.product(DTYPES, LEVELS):
        for tokens, heads, kv_heads, dim, rotary_dim in _ROPES[level]:
            shape: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
            detail = f"{tokens}x{heads}-{kv_heads}x{dim}" + f"-{rotary_dim}" * bool(rotary_dim)
            rope = RopeSpec(dtype=dtype, rotary_dim=rotary_dim, **shape)
            yield _case(rope, detail, level=level, num_tokens=tokens)
            both = RopeKvWriteSpec(dtype=dtype, rotary_dim=rotary_dim, block_size=16, **shape)
            yield _case(both, detail, level=level, num_tokens=tokens)
        for tokens, kv_heads, dim, block_size in _KV_WRITES[level]:
            shape = {"num_kv_heads": kv_heads, "head_dim": dim, "block_size": block_size}
            detail = f"{tokens}x{kv_heads}x{dim}-block{block_size}"
            yield _case(KvWriteSpec(dtype=dtype, **shape), detail, level=level, num_tokens=tokens)
            if kv_heads == 1 and level != "smoke":
                both = RopeKvWriteSpec(dtype=dtype, num_heads=2, **shape)
                yield _case(both, detail, level=level, num_tokens=tokens)
    for kv_dtype in _HALF_DTYPES:
        shape = {"num_kv_heads": 2, "head_dim": 64, "block_size": 16, "kv_dtype": kv_dtype}
        narrow = KvWriteSpec(dtype="float32", **shape)
        yield _case(narrow, f"5x2x64-into-{kv_dtype}", num_tokens=5)
        both = RopeKvWriteSpec(dtype="float32", num_heads=4, **shape)
        yield _case(both, f"5x4-2x64-into-{kv_dtype}", num_tokens=5)


def _attention_cases() -> Iterator[Case]:
    for dtype, level in itertools.product(DTYPES, LEVELS):
        for geometry in _HEADS.get(level, ()):
            yield from _geometry_cases(dtype, level, *geometry)
        for i, geometry in enumerate(_HEADS_BY_TURNS.get(level, ())):
            yield from _geometry_cases(dtype, _by_turns(i, dtype, level), *geometry)
        shape = _shape(dtype, 9, 3, 64, 16)
        for detail, kv_lens in _DECODES[level].items():
            yield _decode(shape, detail, level, kv_lens)
        for detail, (q_lens, kv_lens) in _PREFILLS[level].items():
            prefill = AttentionPrefillSpec(**shape)
            yield _case(prefill, detail, level=level, q_lens=q_lens, kv_lens=kv_lens)
        if level in _ONE_BLOCK:
            q_len, kv_len = _ONE_BLOCK[level]
            shape = _shape(dtype, 2, 1, 64, 16)
            yield from _both(shape, f"one-block-of-{level}", level, (q_len,), (kv_len,))
        fields = dict(_FIELDS.get(level, {}))
        if dtype == "float32" and level == "smoke":
            fields |= {f"{kv_dtype}-cache": {"kv_dtype": kv_dtype} for kv_dtype in _HALF_DTYPES}
        for i, (detail, values) in enumerate(fields.items()):
            shape = _shape(dtype, 6, 2, 64, 16) | values
            alone = "kv_dtype" in values  # there is no other dtype to share with
            ragged, even = (level if alone else _shared(i + j, dtype, level) for j in (0, 1))
            yield _decode(shape, detail, ragged, (33, 0, 16, 5, 6, 10))
            yield _decode(shape, f"{detail}-even", even, (33, 40, 36, 10))
            prefill = AttentionPrefillSpec(**shape)
            q_lens, kv_lens = (3, 5, 2, 9, 10), (33, 2, 0, 9, 10)
            yield _case(prefill, detail, level=level, q_lens=q_lens, kv_lens=kv_lens)
    for dtype, (i, size) in itertools.product(DTYPES, enumerate(_BLOCK_SIZES)):
        edges = (size - 1, size, size + 1, 2 * size, 2 * size + 1)
        shape, q_lens = _shape(dtype, 4, 2, 64, size), (1, size, 2, 3, size + 1)
        level = _by_turns(i, dtype, "quick")
        yield from _both(shape, f"edges-of-{size}", level, q_lens, edges)
    for dtype, (detail, (q_len, kv_len)) in itertools.product(DTYPES, _CONTEXTS.items()):
        shape = _shape(dtype, 2, 1, 64, 16)
        yield from _both(shape, detail, "full", (q_len,), (kv_len,))


def _by_turns(i: int, dtype: str, level: str) -> str:
    """Return the level of option i in `dtype`: its own where it is the dtype's turn."""
    return level if DTYPES.index(dtype) == i % len(DTYPES) else "full"


def _shared(i: int, dtype: str, level: str) -> str:
    """Return the level of option i in `dtype`: float32 and float16 take turns at "smoke"."""
    is_others_turn = dtype in _SHARING and dtype != _SHARING[i % len(_SHARING)]
    return "quick" if is_others_turn and level == "smoke" else level


def _geometry_cases(
    dtype: str, level: str, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> Iterator[Case]:
    shape = _shape(dtype, heads, kv_heads, head_dim, block_size)
    detail = f"{heads}-{kv_heads}x{head_dim}-block{block_size}"
    yield from _both(shape, detail, level, (3, 17), (33, 17))


def _batch_invariant_cases() -> Iterator[Case]:
    """Ops bound as batch_invariant, often other code, are as right as they are otherwise."""
    for dtype in DTYPES:
        own: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
        paged: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 64, "block_size": 16}
        specs: list[OpSpec] = [
            RmsNormSpec(**own, hidden_size=584),
            AddRmsNormSpec(**own, hidden_size=584),
            RopeSpec(**own, num_heads=6, num_kv_heads=2, head_dim=64),
            KvWriteSpec(**own, **paged),
            RopeKvWriteSpec(**own, num_heads=6, **paged),
            SiluMulSpec(**own, intermediate_size=72),
            LinearSpec(**own, in_features=72, out_features=40, bias=True),
            ArgmaxSpec(**own, vocab_size=1000),
            TopLogprobsSpec(**own, vocab_size=1000, num_top=5),
        ]
        for spec in specs:
            yield _case(spec, "invariant", num_tokens=19)
        shape = _shape(dtype, 6, 2, 64, 16) | {"batch_invariant": True}
        yield _decode(shape, "invariant", "smoke", (33, 0, 40, 36))
        prefill = AttentionPrefillSpec(**shape)
        yield _case(prefill, "invariant", q_lens=(3, 17, 5), kv_lens=(33, 17, 2))


def _many_rows_cases() -> Iterator[Case]:
    """Narrow ones, each op in one dtype at "quick": what is left out shows in any."""
    for dtype in DTYPES:
        own: dict[str, Any] = {"dtype": dtype}
        paged: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 64, "block_size": 16}
        specs: list[OpSpec] = [
            RmsNormSpec(**own, hidden_size=72),
            AddRmsNormSpec(**own, hidden_size=72),
            RopeSpec(**own, num_heads=1, num_kv_heads=1, head_dim=64),
            KvWriteSpec(**own, **paged),
            RopeKvWriteSpec(**own, num_heads=1, **paged),
            SiluMulSpec(**own, intermediate_size=72),
            LinearSpec(**own, in_features=72, out_features=40),
            ArgmaxSpec(**own, vocab_size=130),
        ]
        for i, spec in enumerate(specs):
            level = _by_turns(i, dtype, "quick")
            yield _case(spec, f"{_MANY_ROWS}-rows", level=level, num_tokens=_MANY_ROWS)
        for i, (detail, kv_lens) in enumerate(_BATCHES.items()):
            level = _by_turns(i, dtype, "quick")
            yield _decode(_shape(dtype, 6, 3, 64, 16), detail, level, kv_lens)


def _row_table_cases() -> Iterator[Case]:
    """Ops on tables that have a row a request. All of a step's numbers are integers: one dtype."""
    for dtype, level in itertools.product(DTYPES, LEVELS):
        for i, (rows, vocab) in enumerate(_SAMPLES.get(level, ())):
            sample = SampleSpec(dtype=dtype, vocab_size=vocab)
            shared = _shared(i, dtype, level)
            yield _case(sample, f"{rows}x{vocab}", level=shared, num_tokens=rows)
        if level == "smoke":
            sample = SampleSpec(dtype=dtype, vocab_size=130, batch_invariant=True)
            yield _case(sample, "invariant", num_tokens=5)
    for level in LEVELS:
        for rows, block_size in _PREPARES.get(level, ()):
            prepare = PrepareStepSpec(dtype="float32", block_size=block_size)
            yield _case(prepare, f"{rows}-block{block_size}", level=level, num_tokens=rows)
    prepare = PrepareStepSpec(dtype="float32", block_size=16, batch_invariant=True)
    yield _case(prepare, "invariant", num_tokens=19)


def _both(
    shape: dict[str, Any],
    detail: str,
    level: str,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
) -> Iterator[Case]:
    yield _decode(shape, detail, level, kv_lens)
    prefill = AttentionPrefillSpec(**shape)
    yield _case(prefill, detail, level=level, q_lens=q_lens, kv_lens=kv_lens)


def _decode(shape: dict[str, Any], detail: str, level: str, kv_lens: tuple[int, ...]) -> Case:
    decode = AttentionDecodeSpec(**shape)
    return _case(decode, detail, level=level, q_lens=(1,) * len(kv_lens), kv_lens=kv_lens)


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
