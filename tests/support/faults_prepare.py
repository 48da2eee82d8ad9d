"""Faults of `prepare_step`."""

from __future__ import annotations

from support.fault import Fault


def multiplies_slots_in_32_bits(right, spec, a):
    result = right()
    a["slot_mapping"].copy_(a["slot_mapping"].int())
    return result


def gives_padding_the_slot_of_position_0(right, spec, a):
    entries = a["entries"].clone()
    is_padding = entries[:, 1] < 0
    entries[is_padding, 1] = 0
    result = right(entries=entries)
    a["seq_lens"][is_padding] = 0
    return result


def keeps_new_blocks_to_itself(right, spec, a):
    return right(block_table=a["block_table"].clone())


def copies_the_table_before_new_blocks(right, spec, a):
    before = a["block_table"].clone()
    result = right()
    a["step_block_table"].copy_(before[a["rows"]])
    return result


def stores_new_blocks_a_column_late(right, spec, a):
    entries = a["entries"].clone()
    is_new = entries[:, 2] >= 0
    entries[:, 2] = -1
    result = right(entries=entries)
    column = (a["positions"] // spec.block_size + 1).clamp_max(a["block_table"].shape[1] - 1)
    a["block_table"][a["rows"][is_new], column[is_new]] = a["entries"][is_new, 2]
    return result


def leaves_out_the_new_token(right, spec, a):
    result = right()
    a["seq_lens"].sub_(1).clamp_(min=0)
    return result


def takes_tokens_in_order_of_rows(right, spec, a):
    result = right()
    a["input_ids"].copy_(a["last_token"][: len(a["entries"])])
    return result


FAULTS = [
    Fault("step_is_made_from_its_rows", "prepare_step", leaves_out_the_new_token),
    Fault("step_is_made_from_its_rows", "prepare_step", takes_tokens_in_order_of_rows),
    Fault("new_blocks_enter_both_tables", "prepare_step", keeps_new_blocks_to_itself),
    Fault("new_blocks_enter_both_tables", "prepare_step", copies_the_table_before_new_blocks),
    Fault("new_blocks_enter_both_tables", "prepare_step", stores_new_blocks_a_column_late),
    Fault("slots_go_beyond_32_bits", "prepare_step", multiplies_slots_in_32_bits),
    Fault("padding_takes_no_slot", "prepare_step", gives_padding_the_slot_of_position_0),
]
