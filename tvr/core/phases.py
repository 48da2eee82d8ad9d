"""The phases of a step, for who wants to see when each begins and ends.

They are wrapped from outside while somebody looks, so that nobody else pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

from tvr.core import runner as runner_module
from tvr.core.decode_inputs import PackedDecodes
from tvr.core.engine import Engine

#: Returns what a phase is to run within, from its name.
Mark = Callable[[str], AbstractContextManager[object]]

#: Phases of the thread that steps the engine: "collect" waits for a step, and has "update" within
#: it. On a GPU "launch" has "step" within it.
HOST_PHASES = ("schedule", "launch", "collect", "update")

#: Phases within "step", which on a CPU runs in a thread of its own. Of a graph, nobody sees them.
STEP_PHASES = ("prepare", "plan", "forward", "logits", "sample")


class _Place(NamedTuple):
    """Where a phase is called: an attribute of an object or a module."""

    phase: str
    owner: object
    name: str


@contextmanager
def marked_phases(engine: Engine, mark: Mark) -> Iterator[None]:
    """Run each phase of the engine's steps within `mark(phase)`, for as long as this is entered.

    No step may be in flight at the beginning; "step" has behind it what the step computes, as in
    "step: 8 decodes".
    """
    with ExitStack() as stack:
        for place in _places(engine):
            stack.enter_context(_wrapped(place, mark))
        yield


def _places(engine: Engine) -> list[_Place]:
    runner = engine.parts.runner
    return [
        _Place("schedule", engine._scheduler, "schedule"),
        _Place("launch", engine, "_launch"),
        _Place("step", runner, "_run"),
        _Place("step", runner, "_replay"),
        _Place("prepare", runner._tables, "prepare_step"),
        _Place("plan", runner._ops, "plan"),
        _Place("forward", runner._model, "forward"),
        _Place("logits", runner._model, "compute_logits"),
        _Place("sample", runner_module, "sample"),
        _Place("collect", engine, "_collect"),
        _Place("update", engine, "_apply"),
    ]


@contextmanager
def _wrapped(place: _Place, mark: Mark) -> Iterator[None]:
    before = vars(place.owner).get(place.name)
    function: Callable[..., Any] = getattr(place.owner, place.name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with mark(_label(place.phase, args)):
            return function(*args, **kwargs)

    setattr(place.owner, place.name, call)
    try:
        yield
    finally:
        if before is None:
            delattr(place.owner, place.name)  # the class's own shows again
        else:
            setattr(place.owner, place.name, before)


def _label(phase: str, args: tuple[Any, ...]) -> str:
    if phase != "step":
        return phase
    packed = args[0]
    if isinstance(packed, PackedDecodes):
        return f"step: {len(packed.rows)} decodes in a graph"
    counts = [(packed.num_decodes, "decodes"), (packed.num_prefill_tokens, "prefill tokens")]
    return "step: " + ", ".join(f"{n} {what}" for n, what in counts if n)
