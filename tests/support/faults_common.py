"""Faults that any op can have."""

from __future__ import annotations

import math

import torch

from support.fault import Fault, as_if_contiguous


def returns_a_copy(right, spec, a):
    return right().clone()


def scribbles_on_its_input(right, spec, a):
    right()
    a["x"][-1:] += 1
    return a["out"]


def writes_past_the_end(right, spec, a):
    out = right()
    torch.as_strided(out, (out.numel() + 8,), (1,), out.storage_offset())[-8:] = 0
    return out


def ignores_the_row_stride(right, spec, a):
    return right(x=as_if_contiguous(a["x"]))


def fails_on_zero_rows(right, spec, a):
    if len(a["logits"]) == 0:
        raise RuntimeError("invalid configuration argument")
    return right()


def adds_noise(right, spec, a):
    out = right()
    return out.mul_(1 + torch.rand(out.shape))


def spreads_nan_to_all_rows(right, spec, a):
    out = right()
    return out.fill_(math.nan) if a["x"].isnan().any() else out


def sums_by_the_shape_of_the_batch(right, spec, a):
    weight = a["packed"][0][: a["out"].shape[1], : a["x"].shape[1]]
    return torch.mm(a["x"], weight.t(), out=a["out"])


def takes_rows_of_q_and_k_for_apart(right, spec, a):
    q, k = a["q"], a["k"]
    return right(k=k.roll(1, 0)) if q.stride(0) == k.stride(0) else right()


def stores_nothing_beside_a_nan(right, spec, a):
    slots = a["slot_mapping"]
    return right(slot_mapping=torch.full_like(slots, -1) if a["k"].isnan().any() else slots)


def stores_a_lone_row_of_v_twice(right, spec, a):
    result = right()
    if len(a["k"]) == 1:
        right(k=a["v"])
    return result


FAULTS = [
    Fault("outputs_are_returned", "rms_norm", returns_a_copy),
    Fault("inputs_are_unchanged", "silu_mul", scribbles_on_its_input),
    Fault("writes_stay_inside_outputs", "rms_norm", writes_past_the_end),
    Fault("strided_inputs_are_read_right", "rms_norm", ignores_the_row_stride),
    Fault("strided_inputs_are_read_right", "silu_mul", ignores_the_row_stride),
    Fault("empty_batch_is_accepted", "argmax", fails_on_zero_rows),
    Fault("runs_are_bit_equal", "silu_mul", adds_noise),
    Fault("nan_row_stays_alone", "rms_norm", spreads_nan_to_all_rows),
    Fault("rows_do_not_depend_on_batch", "linear", sums_by_the_shape_of_the_batch),
    Fault("strided_rows_are_multiplied_right", "linear", ignores_the_row_stride),
    Fault("strided_inputs_are_read_right", "rope", takes_rows_of_q_and_k_for_apart),
    Fault("nan_row_stays_alone", "kv_write", stores_nothing_beside_a_nan),
    Fault("rows_do_not_depend_on_batch", "kv_write", stores_a_lone_row_of_v_twice),
]
