"""Two runs that must come out the same: by bits if the op is declared deterministic.

An op that is not may sum in another order each time. Then two right results differ by no more than
twice what each may be off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance import tolerance
from tvr.conformance.judge import same_bits, small_frobenius
from tvr.conformance.tensors import dtype_name
from tvr.contract import declared_flags

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.subject import Call, Subject


def same_outputs(backend: Subject, what: str, found: Call, wanted: Call) -> None:
    """Refuse a difference between any outputs of two calls."""
    for name, tensor in found.written.items():
        same(backend, found, f"{what}: {name}" if what else name, tensor, wanted[name])


def same(backend: Subject, call: Call, what: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse a difference between two results, or parts of them, of calls like `call`."""
    flags = declared_flags(backend.info, call.spec, backend.device)
    if "deterministic" in flags or not found.is_floating_point():
        same_bits(what, found, wanted)
        return
    found, wanted = found.cpu(), wanted.cpu()
    is_number = wanted.isfinite()
    same_bits(f"{what}, where it is no finite number", found[~is_number], wanted[~is_number])
    limit = 2 * tolerance.frobenius_limit(dtype_name(found), _num_terms(call))
    small_frobenius(what, found[is_number], wanted[is_number].double(), limit)


def _num_terms(call: Call) -> int:
    """Return at least the number of terms of the op's longest sum."""
    sizes = [value for value in vars(call.spec).values() if type(value) is int]
    step = call.args.get("step")
    return max([*sizes, step.max_seq_len] if step is not None else sizes)
