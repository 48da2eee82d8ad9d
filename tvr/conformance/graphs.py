"""CUDA graphs of an op's run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from tvr.conformance.ledger import CheckFailed

if TYPE_CHECKING:
    from tvr.conformance.subject import Subject

_WARM_UPS = 2


class Graph(Protocol):
    """What was launched during a capture; `replay` launches it again on the current stream."""

    def replay(self) -> None: ...


def why_not(backend: Subject) -> list[str]:
    """Return why nothing can be captured on the backend's device."""
    return [] if backend.device.type == "cuda" else ["graphs need a CUDA device"]


def capture(
    fn: Callable[[], object], device: torch.device, stream: torch.cuda.Stream | None = None
) -> Graph:
    """Return the graph of what `fn` launches, after two runs that are not captured.

    Args:
        fn: launches work on the current stream.
        device: the CUDA device.
        stream: where to capture; None: a new one.

    Raises:
        CheckFailed: `fn` did what cannot be captured, such as waiting for the device.
    """
    if stream is None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            fn()
        torch.cuda.synchronize(device)
        try:
            _capture(graph, fn)
        except RuntimeError as e:
            torch.cuda.synchronize(device)
            raise CheckFailed(f"cannot be captured: {e}") from e
    torch.cuda.synchronize(device)
    return graph


def _capture(graph: torch.cuda.CUDAGraph, fn: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        # A replay that writes nothing is a failure of its own, with more to say than the warning.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        # Other threads may do as they like meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            fn()
        except BaseException as error:
            _abandon(graph, error)
            raise
        graph.capture_end()


def _abandon(graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
    """End a capture that failed, which must be done and fails itself."""
    try:
        graph.capture_end()
    except RuntimeError as e:
        error.__context__ = e
