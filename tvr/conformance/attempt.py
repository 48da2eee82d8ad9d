"""One call of an op, run and judged beside a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvr.conformance.verdict import Comparison, find_fault
from tvr.errors import KernelError

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.fault import Fault
    from tvr.conformance.snapshot import Snapshot
    from tvr.conformance.subject import Call


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What came of a call.

    Attributes:
        found: its outputs; empty if it raised.
        reference: those of the reference; empty if both raised.
        result: what `run` returned.
        problem: what it did that no op may do; "": nothing.
        fault: the first element over its limit; None: there is none, or there is a problem.
    """

    found: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    result: object = None
    problem: str = ""
    fault: Fault | None = None

    @property
    def failed(self) -> bool:
        return bool(self.problem) or self.fault is not None


def attempt(
    snapshot: Snapshot,
    live: Call,
    run: Callable[[], object],
    repeat: Callable[[], Mapping[str, Tensor]],
    rounding: str,
) -> Attempt:
    """Run a call and judge it.

    Args:
        snapshot: the call as it is before.
        live: the call itself.
        run: runs `live` on the backend, to its end, and returns what that returned.
        repeat: runs a copy on the reference and returns its outputs; none: they are not known,
            and no result is judged.
        rounding: where the backend declares that a norm rounds.

    Raises:
        KernelError: the reference raised, and the backend did not.
    """
    try:
        result = run()
    except (Exception, SystemExit) as e:  # what a backend raises is its fault alone
        return _raised(e, repeat)
    try:
        reference = repeat()
    except Exception as e:
        raise KernelError(f"the reference raised {_told(e)}, and the backend did not") from e
    found = snapshot.outputs(live)
    problem = live.wrong_return(result)
    if not problem and (name := snapshot.changed_input(live)) is not None:
        problem = f"wrote its input {name}"
    fault = None
    if not problem and reference:
        fault = find_fault(
            Comparison(call=snapshot.call, found=found, reference=reference, rounding=rounding)
        )
    return Attempt(found=found, reference=reference, result=result, problem=problem, fault=fault)


def _raised(error: BaseException, repeat: Callable[[], Mapping[str, Tensor]]) -> Attempt:
    problem = f"raised {_told(error)}"
    try:
        return Attempt(found={}, reference=repeat(), problem=problem)
    except Exception as e:
        # The inputs may be to blame, or a GPU that takes no more work: the reader must know.
        problem += f"; the reference raises too: {_told(e)}"
        return Attempt(found={}, reference={}, problem=problem)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
