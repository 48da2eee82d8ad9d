"""The named cases of the engine checks: tiny models as data."""

from __future__ import annotations

from typing import Any

from tvr.conformance.case import LEVELS, Case
from tvr.conformance.model_spec import ModelSpec
from tvr.contract import DTYPES

_SIZES = (
    *("num_layers", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    *("hidden_size", "intermediate_size", "vocab_size"),
)
_MODELS = {
    "smoke": [(2, 6, 2, 64, 16, 128, 192, 160)],
    "quick": [(2, 4, 4, 128, 16, 256, 384, 256), (3, 8, 1, 64, 32, 192, 256, 96)],
    "full": [(4, 9, 3, 64, 16, 576, 1536, 1024), (2, 16, 4, 128, 64, 512, 1024, 1000)],
}


def engine_cases(level: str, seed: int = 0) -> list[Case]:
    """Return the named cases that `level` runs, their random numbers seeded by `seed`."""
    return [
        _case(dtype, sizes, at, seed)
        for at in LEVELS[: LEVELS.index(level) + 1]
        for sizes in _MODELS[at]
        for dtype in DTYPES
    ]


def _case(dtype: str, sizes: tuple[int, ...], level: str, seed: int) -> Case:
    facts: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    spec = ModelSpec(dtype=dtype, **facts)
    heads = f"{spec.num_heads}-{spec.num_kv_heads}x{spec.head_dim}"
    layers = f"{spec.num_layers}x{spec.hidden_size}"
    name = f"{spec.op}-{layers}-{heads}-block{spec.block_size}-{spec.dtype}"
    return Case(name=name, spec=spec, level=level, seed=seed)
