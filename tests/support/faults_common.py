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


def forgets_rows_from_2048_on(right, spec, a):
    """As one launch of so many rows would."""
    result = right()
    for out in result if isinstance(result, tuple) else (result,):
        out[2048:] = 0
    return result


def forgets_slots_from_2048_on(right, spec, a):
    slots = a["slot_mapping"].clone()
    slots[2048:] = -1
    return right(slot_mapping=slots)


def forgets_sequences_from_255_on(right, spec, a):
    out = right()
    out[255:] = 0
    return out


def takes_nan_for_zero(right, spec, a):
    result = right()
    for out in result if isinstance(result, tuple) else (result,):
        out.nan_to_num_(0.0)
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
    *(
        Fault("nan_row_stays_alone", op, takes_nan_for_zero)
        for op in ("rms_norm", "add_rms_norm", "rope", "rope_kv_write", "silu_mul", "linear")
    ),
    *(
        Fault(check, op, forgets_rows_from_2048_on, level="quick")
        for op, check in {
            "rms_norm": "norm_rounds_where_declared",
            "add_rms_norm": "sum_is_rounded_before_the_norm",
            "rope": "rotation_is_rounded_once",
            "rope_kv_write": "rotation_is_rounded_once",
            "silu_mul": "gate_comes_first",
            "linear": "product_matches_oracle",
            "argmax": "largest_logit_wins",
        }.items()
    ),
    *(
        Fault("rows_are_stored_bit_equal", op, forgets_slots_from_2048_on, level="quick")
        for op in ("kv_write", "rope_kv_write")
    ),
    Fault(
        "output_matches_oracle", "attention_decode", forgets_sequences_from_255_on, level="quick"
    ),
]
