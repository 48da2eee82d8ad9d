"""Faults of writing to the cache, and of the way it is laid out."""

from __future__ import annotations

from dataclasses import replace

import torch

from support.fault import Fault, as_if_contiguous


def swaps_k_and_v(right, spec, a):
    right(k=a["v"], v=a["k"])


def wraps_slot_minus_one(right, spec, a):
    num_slots = a["k_cache"].shape[0] * a["k_cache"].shape[2]
    right(slot_mapping=a["slot_mapping"] % num_slots)


def rebuilds_the_block_stride(right, spec, a):
    caches = {name: as_if_contiguous(a[name]) for name in ("k_cache", "v_cache")}
    return right(**caches)


def flushes_tiny_numbers(right, spec, a):
    smallest = torch.finfo(a["k"].dtype).smallest_normal
    return right(k=a["k"].masked_fill(a["k"].abs() < smallest, 0))


def stores_nan_as_zero(right, spec, a):
    return right(v=a["v"].nan_to_num(0.0))


def cuts_written_block_ids_to_16_bits(right, spec, a):
    slots, size = a["slot_mapping"], spec.block_size
    return right(slot_mapping=(slots // size & 0xFFFF) * size + slots % size)


def cuts_written_offsets_to_32_bits(right, spec, a):
    slots, size, stride = a["slot_mapping"], spec.block_size, a["k_cache"].stride(0)
    return right(slot_mapping=(slots // size * stride % 2**32) // stride * size + slots % size)


def cuts_block_ids_to_16_bits(right, spec, a):
    step = a["step"]
    return right(step=replace(step, block_table=step.block_table & 0xFFFF))


def cuts_offsets_to_32_bits(right, spec, a):
    step, stride = a["step"], a["k_cache"].stride(0)
    offsets = step.block_table.long() * stride % 2**32
    return right(step=replace(step, block_table=(offsets // stride).int()))


FAULTS = [
    Fault("rows_are_stored_bit_equal", "kv_write", swaps_k_and_v),
    Fault("slot_minus_one_writes_nothing", "kv_write", wraps_slot_minus_one),
    Fault("interleaved_caches_are_written", "kv_write", rebuilds_the_block_stride),
    Fault("interleaved_cache_is_read_right", "attention_decode", rebuilds_the_block_stride),
    Fault("special_values_are_stored_as_they_are", "kv_write", flushes_tiny_numbers),
    Fault("special_values_are_stored_as_they_are", "kv_write", stores_nan_as_zero),
    Fault(
        "block_ids_beyond_16_bits_are_written",
        "kv_write",
        cuts_written_block_ids_to_16_bits,
        level="quick",
    ),
    Fault(
        "offsets_beyond_32_bits_are_written",
        "kv_write",
        cuts_written_offsets_to_32_bits,
        level="full",
    ),
    Fault(
        "block_ids_beyond_16_bits_are_read",
        "attention_decode",
        cuts_block_ids_to_16_bits,
        level="quick",
    ),
    Fault(
        "offsets_beyond_32_bits_are_read", "attention_decode", cuts_offsets_to_32_bits, level="full"
    ),
]
