"""No number without a right result: outputs are judged by the conformance suite's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tvr.bench.gate_attention import judge_attention
from tvr.conformance.checks_common import rows_of, written_rows
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.subject import UPDATED, Call, Subject
from tvr.conformance.verdict import Comparison, find_fault
from tvr.contract import AttentionSpec, SampleSpec, matching_box

if TYPE_CHECKING:
    from torch import Tensor

_CACHES = frozenset({"k_cache", "v_cache"})
_SPARE = _CACHES | UPDATED | {"step_block_table"}
_NO_ID = -7  # what no argmax gives
_FEW = 16  # rows judged at the start, in the middle and at the end


class Gate:
    """Judges calls.

    Args:
        reference: the torch backend, on the device of the calls.
    """

    def __init__(self, reference: Subject) -> None:
        self._reference = reference

    def poison(self, calls: Sequence[Call]) -> None:
        """Fill every output, so that `judge` sees what is not written."""
        for call in calls:
            for name, x in call.written.items():
                if name not in UPDATED:
                    x.fill_(torch.nan if x.is_floating_point() else _NO_ID)

    def judge(self, subject: Subject, calls: Sequence[Call]) -> None:
        """See that every call was run, and that the first and the last one are right.

        Raises:
            CheckFailed: says what is wrong.
        """
        blank = torch.stack([_is_blank(call) for call in calls])
        if blank.any():
            raise CheckFailed(
                f"set {int(blank.int().argmax())} of {len(calls)} has results that nothing wrote, "
                "or that are NaN"
            )
        for call in dict.fromkeys((0, len(calls) - 1)):
            if isinstance(calls[call].spec, AttentionSpec):
                judge_attention(calls[call])
            else:
                self._judge_rows(subject, calls[call])

    def _judge_rows(self, subject: Subject, call: Call) -> None:
        rows = _sample(len(next(iter(call.read.values()))))
        found, again = _tiny(call, rows), _tiny(call, rows)
        if isinstance(call.spec, SampleSpec):
            # Each run has counted its tokens, by which the next one chooses: run it once more.
            subject.run(found)
        before = {name: x.clone() for name, x in again.written.items()}
        self._reference.run(again)
        box = matching_box(subject.info, call.spec, subject.device)
        assert box is not None, "only declared specs are run"
        fault = find_fault(
            Comparison(
                call=again.replace(**before),
                found=found.written,
                reference=again.written,
                rounding=box.norm_rounding,
            )
        )
        if fault is not None:
            at = [rows[fault.index[0]], *fault.index[1:]]
            rule = f" ({fault.rule})" if fault.rule else ""
            raise CheckFailed(
                f"{fault.output}{at} is {fault.found:.6g}, wanted {fault.wanted:.6g} within "
                f"{fault.limit:.3g}{rule}"
            )


def _sample(num_rows: int) -> list[int]:
    """Return some rows, the first and the last among them."""
    middle = range(0, num_rows, -(-num_rows // _FEW))
    picked = {*range(min(_FEW, num_rows)), *middle, *range(max(0, num_rows - _FEW), num_rows)}
    return sorted(picked)


def _tiny(call: Call, rows: list[int]) -> Call:
    """Return a copy of a call with these rows alone, and caches of one slot for each."""
    part = rows_of(call, rows)
    part = part.replace(**{name: part[name].clone() for name in UPDATED & part.written.keys()})
    if not call.stores_in_slots:
        return part
    stored = written_rows(call)
    caches = {name: stored[name][rows].unsqueeze(2) for name in _CACHES}  # [rows, KVH, 1, D]
    slots = torch.arange(len(rows), device=call["slot_mapping"].device)
    return part.replace(**caches, slot_mapping=slots)


def _is_blank(call: Call) -> Tensor:
    """Return whether an output still has an element that `poison` left.

    Caches have spare slots, and tables columns that no sequence uses.
    """
    blank = [
        (x.isnan() if x.is_floating_point() else x == _NO_ID).any()
        for name, x in call.written.items()
        if name not in _SPARE
    ]
    return torch.stack(blank).any() if blank else torch.zeros((), dtype=torch.bool)
