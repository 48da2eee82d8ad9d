"""Capturing steps, or parts of them, as CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from tvr.core.engine_config import EngineConfig
from tvr.core.ops import OpTable
from tvr.errors import KernelError

_LOG = logging.getLogger(__name__)


class Graph(Protocol):
    """What was launched during a capture; `replay` launches it again on the current stream."""

    def replay(self) -> None: ...


#: Runs a function and returns the graph of what it launched.
Capture = Callable[[Callable[[], object]], Graph]


def obstacles(config: EngineConfig, ops: OpTable) -> list[str]:
    """Return why steps cannot be captured; empty: they can."""
    if config.enforce_eager:
        return ["enforce_eager is set"]
    if config.shadow is not None:
        return ["a shadow repeats every op"]
    return [
        f"{op} of backend {name!r} is not declared cuda_graph"
        for op, name in ops.lacking("cuda_graph").items()
        # The first is in no step of decodes only, and behind a graph that ends with logits torch
        # chooses tokens.
        if op not in ("attention_prefill", "sample")
    ]


@contextmanager
def captured(what: str, ops: OpTable) -> Iterator[None]:
    """Say that `what` is captured in here, or why it cannot be.

    Raises:
        KernelError: it cannot; the op at fault is named.
    """
    try:
        with torch.inference_mode():
            yield
    except Exception as error:
        first: BaseException = error  # to end the capture fails as well, and says less
        while first.__context__ is not None:
            first = first.__context__
        culprit, reason = ops.culprit(first), " ".join(str(first).split())
        where = f", by {culprit}" if culprit else ""
        raise KernelError(
            f"{what} cannot be captured in a CUDA graph{where}: "
            f"{type(first).__name__}: {reason}; enforce_eager does without graphs"
        ) from error
    _LOG.info("captured %s", what)


class CudaCapture:
    """Captures CUDA graphs on one stream, in one memory pool.

    Args:
        stream: where to capture; None: on one of torch's own.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, fn: Callable[[], object]) -> Graph:
        """Return the graph of what `fn` launches on the current stream."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            fn()
        return graph


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle of a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
