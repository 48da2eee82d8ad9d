"""Capturing steps, or parts of them, as CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from tvr.core.engine_config import EngineConfig
from tvr.core.ops import OpTable
from tvr.core.streams import launching
from tvr.errors import KernelError

_LOG = logging.getLogger(__name__)


class Graph(Protocol):
    """What was launched during a capture; `replay` launches it again on the current stream."""

    def replay(self) -> None: ...


#: Runs a function and returns the graph of what it launched.
Capture = Callable[[Callable[[], object]], Graph]


def unwanted(config: EngineConfig) -> list[str]:
    """Return why steps are not to be captured, whoever serves them; empty: they are."""
    if config.enforce_eager:
        return ["enforce_eager is set"]
    if config.shadow is not None:
        return ["a shadow repeats every op"]
    return []


def obstacles(config: EngineConfig, ops: OpTable) -> list[str]:
    """Return why steps cannot be captured; empty: they can."""
    if reasons := unwanted(config):
        return reasons
    lacking = ops.lacking("cuda_graph")
    # The first is in no step of decodes only, the second behind it. Of the others one is enough,
    # and where it is argmax, torch chooses tokens that are not greedy behind a graph that ends with
    # logits.
    behind = "sample" if "sample" in lacking else "argmax"
    elsewhere = {"attention_prefill", "top_logprobs", behind}
    return [_undeclared(op, names) for op, names in lacking.items() if op not in elsewhere]


def partial_obstacles(ops: OpTable) -> list[str]:
    """Return what is launched op by op although steps of decodes are graphs, and why."""
    lacking = ops.lacking("cuda_graph")
    return [
        f"{what}: {_undeclared(op, lacking[op])}"
        for op, what in (
            ("attention_prefill", "steps with prompts"),
            ("sample", "the choice of tokens that are not greedy"),
        )
        if op in lacking
    ]


def _undeclared(op: str, backends: Sequence[str]) -> str:
    return f"{op} of backend {' and '.join(map(repr, backends))} is not declared cuda_graph"


class GraphJob(NamedTuple):
    """The graphs of one kind of step, which are captured together.

    Attributes:
        what: the step, as in "a step of 8 decodes".
        num_graphs: how many there are of it.
        capture: captures them with what it is given, behind an eager run: all that a first call
            compiles or allocates is there by then.
    """

    what: str
    num_graphs: int
    capture: Callable[[Capture], None]


def capture_all(
    jobs: Sequence[GraphJob], ops: OpTable, capture: Capture, *, doing: str = "capturing"
) -> None:
    """Capture the graphs of all jobs, in order; the logger of this module is told how far it is.

    Args:
        jobs: what to capture.
        ops: for the name of an op at fault.
        capture: captures a graph.
        doing: what the logger is told that this is.

    Raises:
        KernelError: a step cannot be captured; the op at fault is named.
    """
    total, done = sum(job.num_graphs for job in jobs), 0
    with _no_collection():
        for job in jobs:
            done += job.num_graphs
            _LOG.info("%s CUDA graphs %d/%d: %s", doing, done, total, job.what)
            with _blaming(job.what, ops):
                job.capture(capture)


@contextmanager
def _blaming(what: str, ops: OpTable) -> Iterator[None]:
    """Say why `what` cannot be captured, and which op is at fault."""
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError:
        raise  # says enough, and is no fault of an op
    except Exception as error:
        culprit = ops.culprit(error)
        if culprit is None and error.__cause__ is not None:
            culprit = ops.culprit(error.__cause__)
        where, reason = f", by {culprit}" if culprit else "", " ".join(str(error).split())
        raise KernelError(
            f"{what} cannot be captured in a CUDA graph{where}: "
            f"{type(error).__name__}: {reason}; enforce_eager does without graphs"
        ) from error


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
        failure: Exception | None = None
        try:
            with (
                launching(torch.cuda.current_device()),
                # A capture that fails leaves its own stream the current one.
                torch.cuda.stream(torch.cuda.current_stream()),
                # Other threads may use the device meanwhile.
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                try:
                    fn()
                except Exception as error:
                    failure = error
        except RuntimeError:
            if failure is None:
                raise
        if failure is not None:
            raise failure  # and not that to end the capture failed as well
        return graph


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle of a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
