"""A way to run calls: copied into one call at the bounds, which is launched, and copied out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tvr.conformance import graphs
from tvr.conformance.binding import step_of
from tvr.conformance.frame import Frame, Room
from tvr.conformance.ledger import CheckFailed
from tvr.contract import AttentionSpec, LinearSpec, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.subject import Call, Subject
    from tvr.contract import OpSpec

_PLACES = 3  # in the pool, taken in turn


class PaddedRunner:
    """Runs every call through one of fixed size, as an engine's graph of one batch size does.

    A call has its blocks in another place of the pool than the one before.

    Args:
        backend: whose op it is.
        spec: what all calls are of.
        room: holds the largest of them.
        captured: launch from a graph, captured with nothing but padding rows.
        with_plan: the graph has the plan in it, made with the bounds, and a call is not planned.

    Attributes:
        binding: what the calls are run on.
        plans_with_bounds: whether the host integers that `plan` is given are the bounds, as in
            the captured call, or the call's own.
    """

    def __init__(
        self,
        backend: Subject,
        spec: OpSpec,
        room: Room,
        *,
        captured: bool,
        with_plan: bool = False,
    ) -> None:
        self.binding = backend.binding(spec, room.bounds)
        self.plans_with_bounds = False
        self._backend = backend
        self._room = Room(bounds=room.bounds, num_blocks=room.num_blocks + _PLACES - 1)
        self._captured = captured
        self._with_plan = with_plan
        self._frame: Frame | None = None
        self._run: Callable[[], object]
        self._launch: Callable[[], object]
        self._num_calls = 0

    def __call__(self, call: Call) -> None:
        """Load `call`, plan, launch, and fill its outputs."""
        if self._frame is None or _has_other_packed_weights(self._frame.call, call):
            self._frame = self._open(call)
        frame, first_block = self._frame, self._num_calls % _PLACES
        self._num_calls += 1
        frame.load(call, first_block=first_block)
        if not self._with_plan:
            self.binding.plan(self._planned_step(frame, call))
        before = [tensor.clone() for tensor in frame.call.written.values()]
        self._launch()
        if self._captured and step_of(call).num_tokens:
            after = frame.call.written.values()
            if all(map(_same_bits, after, before)):
                raise CheckFailed(
                    "a replay of its graph writes no output: what run launches is not captured, "
                    "as from host code or on a stream that does not fork from the current one"
                )
        frame.unload(call, first_block=first_block)

    def _open(self, call: Call) -> Frame:
        frame = Frame(call, self._room)
        self._widest_step = step_of(frame.call)
        # Kept beside its graph, as an engine keeps its weights: a graph knows addresses only, and
        # packed weights are nobody else's.
        self._run = launch = self.binding.prepare(frame.call)
        self._launch = launch
        if self._captured:
            self.binding.plan(self._widest_step)
            graph = graphs.capture(
                self._plan_and_run if self._with_plan else launch,
                self._backend.torch_device,
                self._backend.stream,
            )
            self._launch = graph.replay
        return frame

    def _plan_and_run(self) -> None:
        self.binding.plan(self._widest_step)
        self._run()

    def _planned_step(self, frame: Frame, call: Call) -> StepMeta:
        if self.plans_with_bounds or not isinstance(call.spec, AttentionSpec):
            return self._widest_step
        return frame.real_step(call["step"])


def _has_other_packed_weights(packed: Call, call: Call) -> bool:
    """Whether `call` has other weights than were packed: these are not rewritten in place."""
    return isinstance(call.spec, LinearSpec) and not (
        torch.equal(packed["weight"], call["weight"])
        and (call["bias"] is None or torch.equal(packed["bias"], call["bias"]))
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
