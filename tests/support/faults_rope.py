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


FAULTS = [
    Fault("rotation_is_rounded_once", "rope", counts_positions_from_zero),
    Fault("rotation_is_rounded_once", "rope", is_two_ulps_off_in_one_place),
    Fault("rotation_is_rounded_once", "rope", rotates_in_the_activation_dtype),
    Fault("pairs_are_half_split", "rope", pairs_neighbours),
    Fault("rotation_in_place_is_the_same", "rope", writes_rows_of_the_head_count),
    Fault("rotation_in_place_is_the_same", "rope", reads_a_half_already_written),
    Fault("int32_positions_are_refused", "rope", takes_any_positions),
]
