"""Claims about `rope`, and about the rotation in `rope_kv_write`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.checks_common import in_wider_rows
from tvr.conformance.inputs import MAX_POSITION, cos_sin_cache, make_call
from tvr.conformance.judge import within, within_ulps
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.relations import same
from tvr.contract import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

# Where tables, and numbers of 16 bits, with a sign and without, end; and the longest context's end.
_FAR = (8191, 8192, 32767, 32768, 65535, 65536, 131071, 0)
_FAR_ROTARY_DIM = 64  # of the one table kept: 32 MiB


def check_rotation_is_rounded_once(backend: Subject, case: Case) -> None:
    """q and k are turned by the angles of their positions, within one ulp; other channels pass."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    _judge(call)


def check_positions_are_those_given(backend: Subject, case: Case) -> None:
    """Positions may start anywhere, as those of a later chunk do, and come in any order."""
    n = case.num_tokens
    chunk = torch.arange(16, 16 + n) % MAX_POSITION
    decodes = torch.tensor([5, 900, 17]).repeat(-(-n // 3))[:n]
    for positions in (chunk, chunk.flip(0), decodes, torch.full((n,), 7)):
        call = make_call(case, backend.torch_device)
        call["positions"].copy_(positions)
        backend.run(call)
        _judge(call)


def check_far_positions_are_looked_up(backend: Subject, case: Case) -> None:
    """Positions go up to 131,071: around 8,192, 32,768 and 65,536 each finds its own angles."""
    n = case.num_tokens
    for start in range(0, len(_FAR), n):
        positions = [_FAR[(start + i) % len(_FAR)] for i in range(n)]
        call = make_call(case, backend.torch_device)
        call["positions"].copy_(torch.tensor(positions))
        backend.run(call.replace(cos_sin_cache=_far_table(backend.torch_device)))
        _judge(call.replace(cos_sin_cache=_far_table(torch.device("cpu"))))


def check_angles_come_from_inside_the_table(backend: Subject, case: Case) -> None:
    """Nothing before the first or behind the last row of the table is used: NaN stands there."""
    call = make_call(case, backend.torch_device)
    table = call["cos_sin_cache"]
    call["positions"][1::2] = 0
    around = table.new_full((len(table) + 2, table.shape[1]), float("nan"))
    around[1:-1] = table
    call = call.replace(cos_sin_cache=around[1:-1])
    backend.run(call)
    _judge(call)


def check_inverse_angles_undo_the_rotation(backend: Subject, case: Case) -> None:
    """Turned by its angles and then back by them, a row is itself again, to rounding."""
    there = make_call(case, backend.torch_device)
    backend.run(there)
    back_table = there["cos_sin_cache"].clone()
    back_table[:, back_table.shape[1] // 2 :].neg_()
    back = make_call(case, backend.torch_device)
    back = back.replace(q=there["q_out"], k=there["k_out"], cos_sin_cache=back_table)
    backend.run(back)
    positions, table = there["positions"].cpu(), there["cos_sin_cache"].cpu()
    for name in ("q", "k"):
        x = there[name].cpu()
        turned, size = oracle.rope(x, positions, table)
        # What the first rotation may be off by, what the second makes of that, and its own part.
        error = tolerance.ROPE_ULPS * tolerance.ulp(turned, case.spec.dtype)
        _, handed_on = oracle.rope(error + tolerance.ROPE_SLACK * size, positions, table)
        _, size = oracle.rope(turned, positions, table)
        slack = handed_on + tolerance.ROPE_SLACK * (size + x.double().abs())
        found = back[f"{name}_out"]
        within_ulps(f"{name} turned back", found, x.double(), tolerance.ROPE_ULPS, slack)


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
            same(backend, call, name, call[name], apart[name])


def check_int32_positions_are_refused(backend: Subject, case: Case) -> None:
    """Positions are int64: others raise instead of being read as something else."""
    call = make_call(case, backend.torch_device)
    narrow = call.replace(positions=call["positions"].int())
    try:
        backend.run(narrow)
    except Exception:
        return
    raise CheckFailed("int32 positions were accepted")


@cache
def _far_table(device: torch.device) -> Tensor:
    """Return the angles of all far positions, to be read only."""
    return cos_sin_cache(_FAR_ROTARY_DIM, max(_FAR) + 1).to(device)


def _turns_far_channels(case: Case) -> bool:
    spec = case.spec
    assert isinstance(spec, RopeSpec)
    return (spec.rotary_dim or spec.head_dim) == _FAR_ROTARY_DIM


def _judge(call: Call) -> None:
    positions, table = call["positions"].cpu(), call["cos_sin_cache"].cpu()
    for name in ("q", "k"):
        wanted, size = oracle.rope(call[name].cpu(), positions, table)
        slack = tolerance.ROPE_SLACK * size
        within_ulps(f"{name}_out", call[f"{name}_out"], wanted, tolerance.ROPE_ULPS, slack)


_ROPES = ("rope", "rope_kv_write")

CHECKS = (
    Check(run=check_rotation_is_rounded_once, ops=_ROPES),
    Check(run=check_positions_are_those_given, ops=_ROPES),
    Check(run=check_far_positions_are_looked_up, ops=_ROPES, applies=_turns_far_channels),
    Check(run=check_angles_come_from_inside_the_table, ops=_ROPES),
    Check(run=check_inverse_angles_undo_the_rotation, ops=_ROPES),
    Check(run=check_pairs_are_half_split, ops=_ROPES),
    Check(run=check_rotation_in_place_is_the_same, ops=_ROPES),
    Check(run=check_int32_positions_are_refused, ops=_ROPES),
)
