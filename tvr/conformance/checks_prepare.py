"""Claims about `prepare_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.oracle_step import step_of_decodes
from tvr.conformance.row_tables import padding_entry
from tvr.contract import PrepareStepSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

_LARGEST_INT32 = 2**31 - 1
_BY_SEQUENCE = ("input_ids", "positions", "rows", "slot_mapping", "seq_lens")


def check_step_is_made_from_its_rows(backend: Subject, case: Case) -> None:
    """Ids, positions, rows, slots and lengths of each sequence are those of its row."""
    _judge(backend, make_call(case, backend.torch_device), _BY_SEQUENCE)


def check_new_blocks_enter_both_tables(backend: Subject, case: Case) -> None:
    """A new block id is stored in the row's table, which the step's is a copy of; others stay."""
    _judge(backend, make_call(case, backend.torch_device), ("step_block_table", "block_table"))


def check_slots_go_beyond_32_bits(backend: Subject, case: Case) -> None:
    """Slots of the last blocks of a huge pool are int64: no product of 32 bits wraps."""
    call = make_call(case, backend.torch_device)
    call["block_table"].add_(_LARGEST_INT32 - call["block_table"].max())
    call["entries"][1::3, 2] = _LARGEST_INT32
    call["entries"][call["entries"][:, 1] < 0] = padding_entry(call["block_table"])
    _judge(backend, call, ("slot_mapping", "step_block_table"))


def check_padding_takes_no_slot(backend: Subject, case: Case) -> None:
    """Padding has length 0, slot -1 and position 0, and changes no table, however much there is."""
    call = make_call(case, backend.torch_device)
    call["entries"].copy_(padding_entry(call["block_table"]))
    call["entries"][0, 0], call["entries"][0, 1] = 0, 0  # one sequence is none
    before = call["block_table"].clone()
    backend.run(call)
    same_bits("block_table", call["block_table"], before)
    for name, wanted in (("seq_lens", 0), ("slot_mapping", -1), ("positions", 0)):
        found = call[name][1:].tolist()
        if found != [wanted] * len(found):
            raise CheckFailed(f"{name} of padding: is {found}, wanted {wanted} everywhere")


def wanted_step(call: Call, found_table: Tensor) -> dict[str, Tensor]:
    """Return what the call has to write, by name.

    Args:
        call: as it was before it was run.
        found_table: the step's block table that was found; wanted is the same past the sequences'
            ends, where anything may be.
    """
    assert isinstance(call.spec, PrepareStepSpec)
    inputs = call["entries"], call["block_table"], call["last_token"]
    step = step_of_decodes(call.spec.block_size, *inputs)
    device = found_table.device
    table = found_table.clone()
    for ids, row in zip(step.block_ids, table, strict=True):
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    wanted = {
        name: torch.tensor(getattr(step, name), dtype=call[name].dtype, device=device)
        for name in _BY_SEQUENCE
    }
    tables = torch.tensor(step.tables, dtype=torch.int32, device=device)
    return wanted | {"step_block_table": table, "block_table": tables}


def _judge(backend: Subject, call: Call, names: tuple[str, ...]) -> None:
    before = call.replace(block_table=call["block_table"].clone())
    backend.run(call)
    wanted = wanted_step(before, call["step_block_table"])
    for name in names:
        same_bits(name, call[name], wanted[name])


OPS = ("prepare_step",)
CHECKS = (
    Check(run=check_step_is_made_from_its_rows, ops=OPS),
    Check(run=check_new_blocks_enter_both_tables, ops=OPS),
    Check(run=check_slots_go_beyond_32_bits, ops=OPS),
    Check(run=check_padding_takes_no_slot, ops=OPS),
)
