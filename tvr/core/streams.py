"""CUDA streams: a backend's own beside the engine's, and who may launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch

from tvr.contract import BoundOp


@cache
def launching(device_index: int) -> threading.RLock:
    """Return what a thread holds while it launches a step on a device, or captures one.

    Engines of one process may share a stream, a backend's: what one launched while another
    captures there would be in the other's graph, and would not run.
    """
    return threading.RLock()


def on_stream(bound: BoundOp, stream: Any) -> BoundOp:  # noqa: ANN401
    """Return `bound` so that all it launches goes to `stream`, in order with its caller's work."""
    return replace(
        bound,
        run=_forked(bound.run, stream),
        plan=bound.plan and _forked(bound.plan, stream),
        attach=bound.attach and _forked(bound.attach, stream),
        pack=bound.pack and _forked(bound.pack, stream),
    )


def _forked(function: Callable[..., Any], stream: Any) -> Callable[..., Any]:  # noqa: ANN401
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # `wait_stream` records an event and waits for it on the device: the host does not stop,
        # and a graph capture of the caller's stream takes the fork and the join along.
        caller = torch.cuda.current_stream()
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                return function(*args, **kwargs)
        finally:
            # What was launched before an error still runs, on memory that the caller will reuse.
            caller.wait_stream(stream)

    return call
