"""One backend of a comparison, by itself: bound as core binds it, on the stream it owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tvr.bench.timer import Timer, make_timer
from tvr.conformance.binding import Binding, step_of
from tvr.conformance.bounds import exact

if TYPE_CHECKING:
    from tvr.bench.gate import Gate
    from tvr.conformance.subject import Call, Subject


@dataclass(kw_only=True)
class Entry:
    """A backend at a cell, right and ready to be timed.

    Attributes:
        binding: keeps alive what a captured graph reads.
        samples: us per launch, so far.
    """

    timer: Timer
    binding: Binding
    samples: list[float] = field(default_factory=list)


class Peer:
    """A backend that is measured.

    It is alone on its stream, its own if it has one: no event of a fork or a join is timed.

    Args:
        subject: the backend on its device.

    Attributes:
        name: the backend's.
    """

    def __init__(self, subject: Subject) -> None:
        self.name = subject.info.name
        self.subject = subject
        self._stream = subject.stream
        if self._stream is None and subject.device.type == "cuda":
            self._stream = torch.cuda.Stream(subject.torch_device)  # type: ignore[no-untyped-call]

    def enter(self, calls: Sequence[Call], gate: Gate) -> Entry:
        """Return the backend ready to be timed on `calls`, which are layers of one step.

        Raises:
            CheckFailed: it declares the spec and does not bind it, or its results are wrong.
        """
        step = step_of(calls[0])
        self._synchronize()  # inputs were made on another stream
        with torch.cuda.stream(self._stream):  # None changes nothing
            binding = self.subject.binding(calls[0].spec, exact(step))
            binding.plan(step)
            launches = [binding.prepare(call) for call in calls]
        self._synchronize()
        timer = make_timer(launches, self._stream)
        gate.poison(calls)
        self._synchronize()
        timer.once()
        gate.judge(self.subject, calls)
        return Entry(timer=timer, binding=binding)

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self.subject.torch_device)
