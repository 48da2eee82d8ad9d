"""Steps of decodes only, each launched as one CUDA graph.

A graph is captured for each of some batch sizes, largest first, all in one memory pool; a step
runs in the smallest that holds it, filled up with padding. Two graphs of a size differ in how they
end: with the logits, or with greedy tokens in the table that the next step reads them from, so
that greedy decoding is one replay after another.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tvr.contract import Bounds
from tvr.core.batch import DeviceTables
from tvr.core.decode_inputs import NO_DECODES, DecodeInputs, PackedDecodes, with_real_lengths
from tvr.core.engine_config import EngineConfig
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.sampler import greedy_tokens
from tvr.errors import KernelError

_LOG = logging.getLogger(__name__)

#: Larger steps are launched op by op, which costs them little.
MAX_SIZE = 512


class Graph(Protocol):
    """What was launched during a capture; `replay` launches it again on the current stream."""

    def replay(self) -> None: ...


#: Runs a function and returns the graph of what it launched.
Capture = Callable[[Callable[[], object]], Graph]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture for steps of up to `max_num_seqs` sequences.

    Small steps are padded little; from 8 on by 7 sequences at most, from 256 on by 15.

    Source: the sizes that vLLM and mini-sglang capture are of this kind.
    """
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, MAX_SIZE + 1, 16), largest}
    return sorted(size for size in sizes if size <= largest)


def obstacles(config: EngineConfig, ops: OpTable) -> list[str]:
    """Return why steps cannot be captured; empty: they can."""
    if config.enforce_eager:
        return ["enforce_eager is set"]
    if config.shadow is not None:
        return ["a shadow repeats every op"]
    return [
        f"{op} of backend {name!r} is not declared cuda_graph"
        for op, name in ops.lacking("cuda_graph").items()
        if op != "attention_prefill"  # in no step of decodes only
    ]


class DecodeGraphs:
    """The graphs of one model on one device.

    Args:
        model, ops, argmax, kv_cache, tables: what a step runs on. Nothing of it may move.
        max_num_seqs: sequences of the largest step.
        max_seq_len: tokens of the longest sequence.

    Attributes:
        sizes: the batch sizes that have graphs, rising.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        ops: OpTable,
        argmax: Callable[..., Tensor],
        kv_cache: KVCache,
        tables: DeviceTables,
        *,
        max_num_seqs: int,
        max_seq_len: int,
    ) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self._model = model
        self._ops = ops
        self._argmax = argmax
        self._kv_cache = kv_cache
        self._tables = tables
        self._plans_inside = ops.plans_in_graph
        most = self.sizes[-1]
        self._inputs = DecodeInputs(tables, size=most, max_seq_len=max_seq_len)
        self._logits = model.new_logits(most)
        self._tokens = torch.empty(most, dtype=torch.int64, device=tables.device)
        self._preparing: dict[int, Graph] = {}
        self._to_logits: dict[int, Graph] = {}
        self._to_tokens: dict[int, Graph] = {}

    def capture(self, capture: Capture) -> None:
        """Capture all graphs. Each is first run eagerly: then all is compiled and allocated.

        Raises:
            KernelError: a step cannot be captured; the op at fault is named.
        """
        with torch.inference_mode():
            for size in reversed(self.sizes):
                try:
                    self._capture(capture, size)
                except Exception as error:
                    first: BaseException = error  # to end the capture fails as well, and says less
                    while first.__context__ is not None:
                        first = first.__context__
                    culprit, reason = self._ops.culprit(first), " ".join(str(first).split())
                    where = f", by {culprit}" if culprit else ""
                    raise KernelError(
                        f"a step of {size} decodes cannot be captured in a CUDA graph{where}: "
                        f"{type(first).__name__}: {reason}; enforce_eager does without graphs"
                    ) from error
                _LOG.info("captured steps of %d sequences", size)

    def _capture(self, capture: Capture, size: int) -> None:
        self._inputs.load(NO_DECODES, size)
        if not self._plans_inside:
            self._inputs.prepare(size)
            self._preparing[size] = capture(partial(self._inputs.prepare, size))
            self._ops.plan(self._inputs.batch(size))
        self._compute_tokens(size)
        self._to_tokens[size] = capture(partial(self._compute_tokens, size))
        self._to_logits[size] = capture(partial(self._compute_logits, size))

    def holds(self, num_seqs: int) -> bool:
        """Whether there is a graph for a step of so many decodes."""
        return num_seqs <= self.sizes[-1]

    def greedy(self, packed: PackedDecodes) -> Tensor:
        """Run a step and return its greedy tokens [S] int64, -1 for a row without a finite logit.

        The next step overwrites them. The tokens are in the tables already.
        """
        self._run(packed, self._to_tokens)
        return self._tokens[: len(packed.rows)]

    def logits(self, packed: PackedDecodes) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step up to its logits; return them with rows and positions.

        Returns:
            [S, vocab] in the activation dtype, [S] int64 and [S] int64, which the next step
            overwrites.
        """
        self._run(packed, self._to_logits)
        n = len(packed.rows)
        return self._logits[:n], self._inputs.rows[:n], self._inputs.positions[:n]

    def _run(self, packed: PackedDecodes, graphs: dict[int, Graph]) -> None:
        size = self.sizes[bisect_left(self.sizes, len(packed.rows))]
        self._inputs.load(packed, size)
        if not self._plans_inside:
            self._preparing[size].replay()
            self._ops.plan(with_real_lengths(self._inputs.batch(size), packed.seq_lens))
        graphs[size].replay()

    def _compute_logits(self, size: int) -> Tensor:
        batch = self._inputs.batch(size)
        if self._plans_inside:
            self._inputs.prepare(size)
            self._ops.plan(batch)
        hidden = self._model.forward(batch, self._kv_cache)
        return self._model.compute_logits(hidden, out=self._logits[:size])

    def _compute_tokens(self, size: int) -> None:
        tokens = greedy_tokens(self._compute_logits(size), self._argmax)
        self._tokens[:size].copy_(tokens)
        self._tables.keep_tokens(self._inputs.rows[:size], tokens)


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


def capture_on_cuda(
    model: LlamaForCausalLM,
    ops: OpTable,
    argmax: Callable[..., Tensor],
    kv_cache: KVCache,
    tables: DeviceTables,
    bounds: Bounds,
) -> DecodeGraphs:
    """Return the captured graphs of a model, for steps within `bounds`.

    Raises:
        KernelError: a step cannot be captured.
    """
    model.reserve(bounds.max_num_tokens)  # a graph knows addresses: nothing may move from here on
    graphs = DecodeGraphs(
        model,
        ops,
        argmax,
        kv_cache,
        tables,
        max_num_seqs=bounds.max_num_seqs,
        max_seq_len=bounds.max_seq_len,
    )
    with _no_collection():
        graphs.capture(CudaCapture(ops.stream))
    return graphs


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
