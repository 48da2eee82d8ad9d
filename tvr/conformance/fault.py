"""The first element over its limit, where the limit is one of tolerance.py and the oracle's word.

Of numbers that are not finite: where the reference has a NaN one is wanted, and an infinity serves
for it; anywhere else a NaN is wrong, and an infinity counts as the largest number of its dtype. An
element with the reference's own bits is never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tvr.conformance import tolerance
from tvr.conformance.tensors import dtype_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a result, shown at one element.

    Attributes:
        output: the argument that it is an element of, and `index` its place there.
        found, wanted: the element, and what it should be.
        limit: how far off it may be; with `rule`, how far off a part may be, relative to its size.
        rule: says which part that is and how far off; "": the element itself is over its limit.
    """

    output: str
    index: tuple[int, ...]
    found: float
    wanted: float
    limit: float
    rule: str = ""


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Return which elements have equal bits; any NaN equals any other."""
    same = (a == b) & (a.signbit() == b.signbit())
    return same | (a.isnan() & b.isnan())


def first_other(output: str, found: Tensor, wanted: Tensor) -> Fault | None:
    """Return the first element whose bits are not the wanted ones."""
    return _first(~same_bits(found, wanted), output, found, wanted, torch.zeros(()))


def first_off(
    output: str, found: Tensor, wanted: Tensor, limit: Tensor | float, reference: Tensor
) -> Fault | None:
    """Return the first element further than `limit` from `wanted` (fp64)."""
    error = (bounded(found, found.dtype) - bounded(wanted, found.dtype)).abs()
    wrong = ~(error <= limit) & ~same_bits(found, reference)
    wrong &= found.isfinite() | ~reference.isnan()
    return _first(wrong, output, found, wanted, torch.as_tensor(limit))


def first_off_in_ulps(
    output: str,
    found: Tensor,
    wanted: Tensor,
    ulps: float,
    reference: Tensor,
    *,
    slack: Tensor | float = 0.0,
    at_least: float = 0.0,
) -> Fault | None:
    """Return the first element more than `ulps` of its dtype (plus `slack`) from `wanted`."""
    spacing = tolerance.ulp(bounded(wanted, found.dtype), dtype_name(found))
    limit = (ulps * spacing + slack).clamp_min(at_least)
    return first_off(output, found, wanted, limit, reference)


def first_part_off(
    output: str, found: Tensor, wanted: Tensor, limit: Tensor, reference: Tensor, parts: str
) -> Fault | None:
    """Return the worst element of the first part whose relative Frobenius error is over its limit.

    Args:
        output: name of the output.
        found: [parts, ...].
        wanted: the same shape, fp64.
        limit: [parts], of each.
        reference: the same shape. What is not finite there is left to `first_off`.
        parts: what a part is: "row", "sequence".
    """
    goal = bounded(wanted, found.dtype)
    judged = reference.isfinite() & goal.isfinite()
    error = torch.where(judged, (bounded(found, found.dtype) - goal).abs(), 0.0).flatten(1)
    size = torch.linalg.vector_norm(torch.where(judged, goal, 0.0).flatten(1), dim=1)
    total = torch.linalg.vector_norm(error, dim=1)
    wrong = (~(total <= limit * size)).nonzero()
    if not len(wrong):
        return None
    part = int(wrong[0])
    worst = error[part].nan_to_num(torch.inf).argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, found.shape[1:]))
    relative = (total[part] / size[part]).item()
    rule = f"the {parts}'s relative Frobenius error is {relative:.3g}"
    return Fault(
        output=output,
        index=(part, *index),
        found=found[part][index].item(),
        wanted=wanted[part][index].item(),
        limit=limit[part].item(),
        rule=rule,
    )


def bounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as fp64, with infinities as the largest numbers of `dtype`."""
    largest = torch.finfo(dtype).max
    return x.double().clamp(-largest, largest)


def _first(
    wrong: Tensor, output: str, found: Tensor, wanted: Tensor, limit: Tensor
) -> Fault | None:
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    return Fault(
        output=output,
        index=index,
        found=found[index].item(),
        wanted=wanted[index].item(),
        limit=limit.expand(found.shape)[index].item(),
    )
