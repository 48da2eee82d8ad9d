"""Faults of RoPE."""

from __future__ import annotations

import math

import torch

from support.fault import Fault, as_if_contiguous


def counts_positions_from_zero(right, spec, a):
    return right(positions=torch.arange(len(a["positions"])))


def rotates_in_the_activation_dtype(right, spec, a):
    return right(cos_sin_cache=a["cos_sin_cache"].to(a["q"].dtype).float())


def is_two_ulps_off_in_one_place(right, spec, a):
    right()
    far = torch.tensor(math.inf, dtype=a["q_out"].dtype)
    for _ in range(2):
        a["q_out"][0, 0, 0] = torch.nextafter(a["q_out"][0, 0, 0], far)
    return a["q_out"], a["k_out"]


def pairs_neighbours(right, spec, a):
    half = a["cos_sin_cache"].shape[1] // 2
    order = torch.arange(2 * half).view(half, 2).t().flatten()  # 0, 2, 4, ... 1, 3, 5, ...
    for name in ("q", "k"):
        out = a[f"{name}_out"]
        out.copy_(a[name])
        out[..., : 2 * half] = a[name][..., order]
    right(q=a["q_out"], k=a["k_out"])
    for name in ("q", "k"):
        out = a[f"{name}_out"]
        out[..., order] = out[..., : 2 * half].clone()
    return a["q_out"], a["k_out"]


def reads_a_half_already_written(right, spec, a):
    right()
    if a["q_out"] is a["q"]:
        a["q_out"][..., -1] += a["q_out"][..., 0]
    return a["q_out"], a["k_out"]


def writes_rows_of_the_head_count(right, spec, a):
    """As if the outputs were contiguous, which they are unless they are slices of a qkv buffer."""
    right(q_out=as_if_contiguous(a["q_out"]), k_out=as_if_contiguous(a["k_out"]))
    return a["q_out"], a["k_out"]


def takes_any_positions(right, spec, a):
    return right(positions=a["positions"].long())


def restarts_positions_in_each_chunk(right, spec, a):
    return right(positions=a["positions"] - a["positions"][:1])


def turns_by_angles_of_its_own(right, spec, a):
    """Those of theta 10,000, whatever scaling is in the table."""
    max_position, dim = a["cos_sin_cache"].shape
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.arange(max_position).unsqueeze(1) * frequency
    return right(cos_sin_cache=torch.cat([angle.cos(), angle.sin()], dim=1))


def blends_in_nothing_of_the_next_row(right, spec, a):
    table = a["cos_sin_cache"]
    right()
    more = (table.storage_offset() + (len(table) + 1) * table.shape[1]) * table.element_size()
    if more <= table.untyped_storage().nbytes():
        a["q_out"] += 0 * table.as_strided((len(table) + 1, table.shape[1]), table.stride())[-1, 0]
    return a["q_out"], a["k_out"]


def takes_every_sine_for_positive(right, spec, a):
    return right(cos_sin_cache=a["cos_sin_cache"].abs())


def leaves_unwritten_rows_as_they_are(right, spec, a):
    right()
    skipped = a["slot_mapping"] < 0
    a["k_out"][skipped] = a["k"][skipped]
    return a["q_out"], a["k_out"]


def ends_its_table_at_position_8191(right, spec, a):
    return right(positions=a["positions"].clamp(max=8191))


def keeps_positions_in_16_bits(right, spec, a):
    return right(positions=a["positions"].short().long() % len(a["cos_sin_cache"]))


def keeps_positions_in_16_bits_without_a_sign(right, spec, a):
    return right(positions=a["positions"] & 0xFFFF)


FAULTS = [
    Fault("rotation_is_rounded_once", "rope", counts_positions_from_zero),
    Fault("rotation_is_rounded_once", "rope", is_two_ulps_off_in_one_place),
    Fault("rotation_is_rounded_once", "rope", rotates_in_the_activation_dtype),
    Fault("pairs_are_half_split", "rope", pairs_neighbours),
    Fault("rotation_in_place_is_the_same", "rope", writes_rows_of_the_head_count),
    Fault("rotation_in_place_is_the_same", "rope", reads_a_half_already_written),
    Fault("int32_positions_are_refused", "rope", takes_any_positions),
    Fault("positions_are_those_given", "rope", restarts_positions_in_each_chunk),
    Fault("far_positions_are_looked_up", "rope", ends_its_table_at_position_8191),
    Fault("far_positions_are_looked_up", "rope_kv_write", ends_its_table_at_position_8191),
    Fault("far_positions_are_looked_up", "rope", keeps_positions_in_16_bits),
    Fault("far_positions_are_looked_up", "rope", keeps_positions_in_16_bits_without_a_sign),
    Fault("rotation_is_rounded_once", "rope", turns_by_angles_of_its_own),
    Fault("angles_come_from_inside_the_table", "rope", blends_in_nothing_of_the_next_row),
    Fault("inverse_angles_undo_the_rotation", "rope", takes_every_sine_for_positive),
    Fault("slot_minus_one_writes_nothing", "rope_kv_write", leaves_unwritten_rows_as_they_are),
]
