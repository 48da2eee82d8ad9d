"""Comparisons that raise `CheckFailed` with what was found and what was wanted.

Each also notes how near to its limit it came, for the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import margin, tolerance
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.tensors import dtype_name

if TYPE_CHECKING:
    from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(what: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse any difference, that of two NaNs or of the two zeros too."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise CheckFailed(
            f"{what}: is {found.dtype} {list(found.shape)}, wanted {wanted.dtype} "
            f"{list(wanted.shape)}"
        )
    if found.device != wanted.device:
        found, wanted = found.cpu(), wanted.cpu()
    # Compared where they are: a workspace or a cache is large, and seldom differs.
    bits = _BITS[found.element_size()]
    differ = found.contiguous().view(bits) != wanted.contiguous().view(bits)
    num_differ = int(differ.sum())
    margin.note(float(num_differ), 0.0)
    if num_differ:
        _refuse(what, differ.cpu(), found.cpu(), wanted.cpu(), "must be bit-equal")


def within(what: str, found: Tensor, wanted: Tensor, limit: Tensor | float, note: str) -> None:
    """Refuse an element further than `limit` from `wanted` (fp64), or a NaN."""
    found = found.cpu().double()
    error = (found - wanted).abs()
    _note_worst(error, torch.as_tensor(limit, dtype=torch.float64).expand_as(error))
    _refuse(what, ~(error <= limit), found, wanted, note)


def between(what: str, found: Tensor, ends: tuple[Tensor, Tensor], wanted: Tensor) -> None:
    """Refuse an element outside the range of `ends`, given in either order, or a NaN."""
    inside = (found >= torch.minimum(*ends)) & (found <= torch.maximum(*ends))
    _refuse(what, ~inside, found, wanted, "rounding explains no such difference")


def within_ulps(
    what: str, found: Tensor, wanted: Tensor, ulps: float, slack: Tensor | float = 0.0
) -> None:
    """Refuse an element more than `ulps` of its dtype (plus `slack`) from `wanted` (fp64)."""
    limit = ulps * tolerance.ulp(wanted, dtype_name(found)) + slack
    within(what, found, wanted, limit, f"must be within {ulps:g} ulp")


def small_frobenius(what: str, found: Tensor, wanted: Tensor, limit: float) -> None:
    """Refuse a relative Frobenius error above `limit`, or a NaN."""
    error = torch.linalg.vector_norm(found.cpu().double() - wanted)
    size = torch.linalg.vector_norm(wanted)
    margin.note(error.item(), (limit * size).item())
    if not error <= limit * size:
        raise CheckFailed(
            f"{what}: relative Frobenius error {(error / size).item():.3g}, at most {limit:.3g}"
        )


def small_frobenius_in_rows(
    what: str, found: Tensor, wanted: Tensor, limit: float, slack: Tensor
) -> None:
    """Refuse a row [T, N] with a Frobenius error above `limit` of its own size plus slack [T]."""
    error = torch.linalg.vector_norm(found.cpu().double() - wanted, dim=-1)
    size = torch.linalg.vector_norm(wanted, dim=-1)
    allowed = limit * size + slack
    _note_worst(error, allowed)
    wrong = ~(error <= allowed)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise CheckFailed(
            f"row {row} of {what}: Frobenius error {error[row].item():.3g}, at most "
            f"{allowed[row].item():.3g}; {int(wrong.sum())} of {len(wrong)} rows are off"
        )


def _note_worst(error: Tensor, limit: Tensor) -> None:
    """Note the element that comes nearest to its limit, or goes furthest over it."""
    if error.numel():
        share = torch.where(error == 0, 0.0, error / limit)  # a NaN is the largest for argmax
        worst = share.flatten().argmax()
        margin.note(error.flatten()[worst].item(), limit.flatten()[worst].item())


def _refuse(what: str, wrong: Tensor, found: Tensor, wanted: Tensor, note: str) -> None:
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    raise CheckFailed(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off ({note}); first at "
        f"{list(first)}: found {found[first].item():.9g}, wanted {wanted[first].item():.9g}"
    )
