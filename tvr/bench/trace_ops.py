"""Makes each call of a bound op a named range of a profile: "attention_decode [pycuda]"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

if TYPE_CHECKING:
    from tvr.contract import BoundOp, Bounds, DeviceFacts, OpSpec, StepMeta
    from tvr.core.plugins import BackendManager


class OpRanges:
    """A watcher of an engine (`tvr.core.watcher.Watcher`). Steps overlap as they do without it.

    Attributes:
        names: of the ranges there can be.
    """

    one_at_a_time = False

    def __init__(self) -> None:
        self.names: set[str] = set()

    def begin(self, manager: BackendManager, device: DeviceFacts) -> None:
        """Nothing is to be prepared."""

    def watch(self, site: str, backend: str, spec: OpSpec, bound: BoundOp) -> BoundOp:
        """Return `bound` with each call in a range."""
        name = range_name(spec.op, backend)
        self.names.add(name)
        return replace(bound, run=_in_range(name, bound.run))

    def start(self, bounds: Bounds) -> None:
        """Requests come next, which need nothing."""

    def begin_step(self, step: StepMeta) -> None:
        """A step comes next, whose phases are ranges of their own."""


def range_name(op: str, backend: str) -> str:
    """Return the name of the range of an op's call."""
    return f"{op} [{backend}]"


def _in_range(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with record_function(name):
            return run(*args, **kwargs)

    return call
