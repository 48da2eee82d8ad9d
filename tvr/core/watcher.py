"""What may look over the shoulder of a running model: each call of an op, and where it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tvr.contract import BoundOp, Bounds, DeviceFacts, OpSpec, StepMeta
    from tvr.core.plugins import BackendManager


@runtime_checkable
class Watcher(Protocol):
    """Is asked once for each place in the model; without one, the model calls the bare ops.

    `tvr.conformance.shadow.Shadow` is one.

    Attributes:
        one_at_a_time: whether a step may begin only when the one before it is done.
    """

    one_at_a_time: bool

    def begin(self, manager: BackendManager, device: DeviceFacts) -> None:
        """Get ready for an engine with these backends; nothing is bound yet."""

    def watch(self, site: str, backend: str, spec: OpSpec, bound: BoundOp) -> BoundOp:
        """Return what the model is to call at `site` in place of the `bound` of `backend`."""

    def start(self, bounds: Bounds) -> None:
        """Note that all is bound and that requests come next, within `bounds`.

        Calls before this are the engine's own, which measures how much memory it needs.
        """

    def begin_step(self, step: StepMeta) -> None:
        """Note that the ops called from now on belong to this step, all of it."""
