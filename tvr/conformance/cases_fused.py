"""The named cases of `fused_linear`: every number of rows it is wanted for, and what is fused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tvr.conformance.case import LEVELS, Case
from tvr.contract import DTYPES, FusedLinearSpec

_MOST_ROWS = 8  # of those with more than one
_NORMED: dict[str, Any] = {"rms_norm": True}
_GATED: dict[str, Any] = {"silu_mul": True}
_ADDED: dict[str, Any] = {"add": True}
_BIASED: dict[str, Any] = {"bias": True}
# (rows, in, out, what is fused): rows of one tile and of several, odd sizes, one column
_FUSED: dict[str, list[tuple[int, int, int, dict[str, Any]]]] = {
    "smoke": [
        *((1, 64, 96, _NORMED), (3, 72, 5, _NORMED | _BIASED), (2, 2056, 16, _NORMED)),
        *((1, 72, 10, _NORMED | _GATED), (8, 576, 40, _NORMED | _GATED)),
        *((3, 2056, 12, _NORMED | _GATED), (4, 72, 6, _GATED | _BIASED), (1, 64, 2, _GATED)),
        *((1, 72, 5, _ADDED), (8, 576, 40, _ADDED), (2, 2056, 8, _ADDED | _BIASED)),
        *((5, 72, 40, _NORMED | _ADDED), (2, 64, 40, _BIASED)),
    ],
    "quick": [
        *((rows, 72, 40, _NORMED | _GATED) for rows in (2, 3, 4, 5, 6, 7)),
        *((rows, 72, 40, _ADDED) for rows in (2, 3, 4, 5, 6, 7)),
        *((1, 8200, 16, _NORMED), (8, 8200, 16, _ADDED), (8, 2048, 512, _NORMED | _GATED)),
        *((1, 2048, 512, _NORMED | _GATED), (4, 4096, 264, _NORMED), (1, 14336, 40, _ADDED)),
    ],
    "full": [
        (8, 3072, 5120, _NORMED),
        (1, 4096, 28672, _NORMED | _GATED),
        (2, 14336, 4096, _ADDED),
    ],
}


def fused_cases() -> Iterator[Case]:
    """Yield all of them."""
    for dtype, level in itertools.product(DTYPES, LEVELS):
        for rows, n_in, n_out, fused in _FUSED[level]:
            yield _case(dtype, level, rows, n_in, n_out, fused)
    kinds = (_NORMED | _GATED, _ADDED)
    for dtype, fused, rows in itertools.product(DTYPES, kinds, (1, 7)):
        yield _case(dtype, "smoke", rows, 72, 40, fused | {"batch_invariant": True})


def _case(dtype: str, level: str, rows: int, n_in: int, n_out: int, fused: dict[str, Any]) -> Case:
    most = 1 if rows == 1 else _MOST_ROWS
    sizes: dict[str, Any] = {"in_features": n_in, "out_features": n_out, "max_rows": most}
    spec = FusedLinearSpec(dtype=dtype, **sizes, **fused)
    name = "-".join([spec.op, f"{rows}x{n_in}x{n_out}", *fused, dtype])
    return Case(name=name, spec=spec, level=level, num_tokens=rows)
