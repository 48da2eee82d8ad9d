"""Claims about where an op launches: on the current stream, or its backend's, and on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance.accuracy import require_right
from tvr.conformance.binding import step_of
from tvr.conformance.bounds import exact
from tvr.conformance.frame import Frame, Room
from tvr.conformance.inputs import make_call
from tvr.conformance.ledger import Check, CheckFailed
from tvr.contract import OPS

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

_DELAY_CYCLES = 20_000_000  # over 10 ms: longer than the host takes to launch what follows


def check_run_follows_the_current_stream(backend: Subject, case: Case) -> None:
    """An op waits for what its stream does before it, and is waited for by what comes behind."""
    device = backend.torch_device
    binding = backend.binding(case.spec, exact(step_of(make_call(case, device))))

    def behind_a_delay(call: Call) -> None:
        num_blocks = len(call["k_cache"]) if "k_cache" in call.args else 0
        frame = Frame(call, Room(bounds=exact(step_of(call)), num_blocks=num_blocks))
        frame.load(call)
        framed = frame.call
        if "step" in call.args:
            # Nothing is captured: an op may go by the host integers of its step.
            framed = framed.replace(step=frame.real_step(call["step"]))
        step = step_of(framed)
        run = binding.prepare(framed)
        binding.plan(step)
        run()  # the first call may compile, which takes longer than the delay
        frame.clear()
        torch.cuda.synchronize(device)
        stream = backend.stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for launch in (lambda: binding.plan(step), run):
                # Each behind a delay of its own: a plan may wait for its stream.
                frame.clear()
                torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
                frame.load(call)
                launch()
            frame.unload(call)
            frame.clear()
        if not torch.cuda.default_stream(device).query():
            raise CheckFailed("puts work on the default stream; another was current")

    require_right(backend.with_runner(behind_a_delay), case)


def check_another_device_may_be_current(backend: Subject, case: Case) -> None:
    """An op launches on the device of its tensors, whichever device is current."""
    mine = backend.torch_device.index or 0
    binding = backend.binding(case.spec, exact(step_of(make_call(case, backend.torch_device))))

    def elsewhere(call: Call) -> None:
        with torch.cuda.device(1 if mine == 0 else 0):
            binding(call)

    require_right(backend.with_runner(elsewhere), case)


def needs_stream(backend: Subject, case: Case) -> list[str]:
    """Return why there are no streams to check."""
    return [] if backend.device.type == "cuda" else ["streams need a CUDA device"]


def needs_two_devices(backend: Subject, case: Case) -> list[str]:
    """Return why no other device can be current."""
    has_two = backend.device.type == "cuda" and torch.cuda.device_count() > 1
    return [] if has_two else ["needs two CUDA devices"]


CHECKS = (
    Check(run=check_run_follows_the_current_stream, ops=OPS, needs=needs_stream),
    Check(run=check_another_device_may_be_current, ops=OPS, needs=needs_two_devices),
)
