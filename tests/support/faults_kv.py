"""Faults of writing to the cache, and of the way it is laid out."""

from __future__ import annotations

from support.fault import Fault, as_if_contiguous


def swaps_k_and_v(right, spec, a):
    right(k=a["v"], v=a["k"])


def wraps_slot_minus_one(right, spec, a):
    num_slots = a["k_cache"].shape[0] * a["k_cache"].shape[2]
    right(slot_mapping=a["slot_mapping"] % num_slots)


def rebuilds_the_block_stride(right, spec, a):
    caches = {name: as_if_contiguous(a[name]) for name in ("k_cache", "v_cache")}
    return right(**caches)


FAULTS = [
    Fault("rows_are_stored_bit_equal", "kv_write", swaps_k_and_v),
    Fault("slot_minus_one_writes_nothing", "kv_write", wraps_slot_minus_one),
    Fault("interleaved_caches_are_written", "kv_write", rebuilds_the_block_stride),
    Fault("interleaved_cache_is_read_right", "attention_decode", rebuilds_the_block_stride),
]
