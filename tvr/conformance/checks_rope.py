"""Claims about `rope`, and about the rotation in `rope_kv_write`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.checks_common import in_wider_rows
from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits, within, within_ulps
from tvr.conformance.ledger import Check, CheckFailed

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


def check_rotation_is_rounded_once(backend: Subject, case: Case) -> None:
    """q and k are turned by the angles of their positions, within one ulp; other channels pass."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    positions, table = call["positions"].cpu(), call["cos_sin_cache"].cpu()
    for name in ("q", "k"):
        wanted, size = oracle.rope(call[name].cpu(), positions, table)
        slack = tolerance.ROPE_SLACK * size
        within_ulps(f"{name}_out", call[f"{name}_out"], wanted, tolerance.ROPE_ULPS, slack)


def check_pairs_are_half_split(backend: Subject, case: Case) -> None:
    """Channel i pairs with i + rotary_dim / 2: a quarter turn swaps the halves, one negated."""
    call = make_call(case, backend.torch_device)
    half = call["cos_sin_cache"].shape[1] // 2
    call["cos_sin_cache"][:, :half] = 0
    call["cos_sin_cache"][:, half:] = 1
    backend.run(call)
    for name in ("q", "k"):
        x = call[name].cpu().double()
        wanted = torch.cat([-x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]], dim=-1)
        within(f"{name}_out", call[f"{name}_out"], wanted, 0.0, "must be the halves swapped")


def check_rotation_in_place_is_the_same(backend: Subject, case: Case) -> None:
    """q_out and k_out may be q and k, and then slices of wider rows too, as in one qkv buffer."""
    apart = make_call(case, backend.torch_device)
    backend.run(apart)
    for place in (torch.clone, in_wider_rows):
        call = make_call(case, backend.torch_device)
        q, k = place(call["q"]), place(call["k"])
        call = call.replace(q=q, k=k, q_out=q, k_out=k)
        backend.run(call)
        for name in ("q_out", "k_out"):
            same_bits(name, call[name], apart[name])


def check_int32_positions_are_refused(backend: Subject, case: Case) -> None:
    """Positions are int64: others raise instead of being read as something else."""
    call = make_call(case, backend.torch_device)
    narrow = call.replace(positions=call["positions"].int())
    try:
        backend.run(narrow)
    except Exception:
        return
    raise CheckFailed("int32 positions were accepted")


_ROPES = ("rope", "rope_kv_write")

CHECKS = (
    Check(run=check_rotation_is_rounded_once, ops=_ROPES),
    Check(run=check_pairs_are_half_split, ops=_ROPES),
    Check(run=check_rotation_in_place_is_the_same, ops=_ROPES),
    Check(run=check_int32_positions_are_refused, ops=_ROPES),
)
