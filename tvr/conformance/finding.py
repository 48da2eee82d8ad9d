"""What a shadow found: which call of a running model is wrong, and where in it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvr.conformance.fault import Fault
    from tvr.conformance.snapshot import Snapshot
    from tvr.contract import StepMeta


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first call that is wrong. `str()` tells all of it in one line.

    Attributes:
        op, backend: what was called, and whose it is.
        site: where in the model, in the words of a checkpoint's tensor names.
        step: number of the engine's step, from 0.
        problem: what the op did that no op may do; "": a result is over its limit.
        fault: the first element over its limit, in the model's own numbers; None: a problem.
        row: which row of the call that is, and whose; "" if not known.
        kept: where the call is kept and how to see it again, or why it could not be kept; "" in
            the file itself.
    """

    op: str
    backend: str
    site: str
    step: int
    problem: str
    fault: Fault | None
    row: str
    kept: str

    def __str__(self) -> str:
        where = f"{self.op} of backend {self.backend!r} at {self.site}, step {self.step}"
        row = f" {self.row}:" if self.row else ""
        what = self.problem if self.fault is None else describe(self.fault)
        return f"{where}:{row} {what}" + (f"; {self.kept}" if self.kept else "")


def describe(fault: Fault) -> str:
    """Return a fault as text: element, found, wanted and limit."""
    at = ", ".join(map(str, fault.index))
    element = f"{fault.output}[{at}] is {fault.found:.9g}, wanted {fault.wanted:.9g}"
    if fault.rule:
        return f"{fault.rule}, limit {fault.limit:.3g}; furthest off, {element}"
    return f"{element}, limit {fault.limit:.3g}"


def row_of(fault: Fault, snapshot: Snapshot, step: StepMeta, site: str) -> str:
    """Return which row of the call, or of the model's step, a fault is in.

    Args:
        fault: in the numbers of `snapshot`.
        snapshot: the call.
        step: the whole step.
        site: sites outside the layers see other rows than the step's.
    """
    row = fault.index[0]
    if fault.output.endswith("_cache"):
        block_size = snapshot.call[fault.output].shape[2]
        slots = snapshot.call["slot_mapping"].tolist()
        slot = fault.index[0] * block_size + fault.index[2]
        if slot not in slots:
            return "a slot that no row was to be written to"
        row = slots.index(slot)
    if not site.startswith("layers."):
        return f"row {row}"
    # A prefill's rows come behind the step's decodes.
    part = snapshot.call.args.get("step")
    is_prefill = snapshot.call.spec.op == "attention_prefill"
    token = row + (step.num_tokens - part.num_tokens if part is not None and is_prefill else 0)
    edges = step.cu_seqlens_q.tolist()
    s = bisect_right(edges, token) - 1
    position = step.seq_lens_cpu[s] - edges[s + 1] + token
    return f"row {row} (sequence {s} of the step, position {position})"
