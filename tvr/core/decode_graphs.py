"""Steps of decodes only, each launched as one CUDA graph.

A graph is captured for each of some batch sizes, largest first, all in one memory pool; a step
runs in the smallest that holds it, filled up with padding. Two graphs of a size differ in how they
end: with the logits, or with tokens in the table that the next step reads them from, so that
decoding is one replay after another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tvr.core.batch import DeviceTables
from tvr.core.decode_inputs import NO_DECODES, DecodeInputs, PackedDecodes, with_real_lengths
from tvr.core.graph_capture import Capture, Graph, GraphJob
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.sampler import greedy_tokens
from tvr.core.sampler_state import SamplerState
from tvr.core.step_ops import StepOps

#: Larger steps are launched op by op, which costs them little.
MAX_SIZE = 512


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture for steps of up to `max_num_seqs` sequences.

    Small steps are padded little; from 8 on by 7 sequences at most, from 256 on by 15.

    Source: the sizes that vLLM and mini-sglang capture are of this kind.
    """
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, MAX_SIZE + 1, 16), largest}
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """The graphs of one model on one device.

    Args:
        model, ops, step_ops, kv_cache, tables, sampler: what a step runs on. Nothing of it may
            move.
        max_num_seqs: sequences of the largest step.
        max_seq_len: tokens of the longest sequence.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        ops: OpTable,
        step_ops: StepOps,
        kv_cache: KVCache,
        tables: DeviceTables,
        sampler: SamplerState,
        *,
        max_num_seqs: int,
        max_seq_len: int,
    ) -> None:
        self._sizes = graph_sizes(max_num_seqs)
        self._model = model
        self._ops = ops
        self._step_ops = step_ops
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._tables = tables
        self._plans_inside = ops.plans_in_graph(prefill=False)
        most = self._sizes[-1]
        self._inputs = DecodeInputs(
            tables, step_ops.prepare_step, size=most, max_seq_len=max_seq_len
        )
        self._logits = model.new_logits(most)
        self._tokens = torch.empty(most, dtype=torch.int64, device=tables.device)
        self._preparing: dict[int, Graph] = {}
        self._to_logits: dict[int, Graph] = {}
        self._to_tokens: dict[int, Graph] = {}

    def jobs(self) -> list[GraphJob]:
        """Return what captures the graphs, largest first."""
        num_graphs = 2 if self._plans_inside else 3
        return [
            GraphJob(f"a step of {size} decodes", num_graphs, partial(self._capture, size))
            for size in reversed(self._sizes)
        ]

    def _capture(self, size: int, capture: Capture) -> None:
        self._inputs.load(NO_DECODES, size)
        if not self._plans_inside:
            self._inputs.prepare(size)
            self._preparing[size] = capture(partial(self._inputs.prepare, size))
            self._ops.plan(self._inputs.batch(size))
        self._compute_tokens(size)
        self._to_tokens[size] = capture(partial(self._compute_tokens, size))
        self._to_logits[size] = capture(partial(self._compute_logits, size))

    def __str__(self) -> str:
        return f"{self._sizes[-1]} decodes"

    def holds(self, num_seqs: int) -> bool:
        """Whether there is a graph for a step of so many decodes."""
        return num_seqs <= self._sizes[-1]

    def chooses(self, rows: list[int]) -> bool:
        """Whether `tokens` gives these rows of the sampler what they ask for."""
        if self._step_ops.sample is None:
            return self._sampler.is_greedy(rows)
        return self._sampler.is_usual(rows)

    def tokens(self, packed: PackedDecodes) -> tuple[Tensor, Tensor]:
        """Run a step whose rows it `chooses` for; return the tokens [S] int64 and the logits.

        A row without a finite logit has -1. Both are overwritten by the next step; the tokens are
        in the tables already.
        """
        self._run(packed, self._to_tokens)
        n = len(packed.rows)
        return self._tokens[:n], self._logits[:n]

    def again(self, packed: PackedDecodes) -> Callable[[], None]:
        """Return what launches a step again and nothing else, to be timed.

        Each launch starts from what the step loaded and planned, and writes keys, values and tokens
        in place of that step's; so nobody may want more of those requests.

        Args:
            packed: the last step of all, which `tokens` has run.
        """
        size = self._size(len(packed.rows))
        graphs = [of[size] for of in (self._preparing, self._to_tokens) if size in of]

        def launch() -> None:
            for graph in graphs:
                graph.replay()

        return launch

    def logits(self, packed: PackedDecodes) -> tuple[Tensor, Tensor, Tensor]:
        """Run a step up to its logits; return them with rows and positions.

        Returns:
            [S, vocab] in the activation dtype, [S] int64 and [S] int64, which the next step
            overwrites.
        """
        self._run(packed, self._to_logits)
        n = len(packed.rows)
        return self._logits[:n], self._inputs.rows[:n], self._inputs.positions[:n]

    def _size(self, num_seqs: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_seqs)]

    def _run(self, packed: PackedDecodes, graphs: dict[int, Graph]) -> None:
        size = self._size(len(packed.rows))
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
        logits, rows = self._compute_logits(size), self._inputs.rows[:size]
        out = self._tokens[:size]
        if self._step_ops.sample is None:
            out.copy_(greedy_tokens(logits, self._step_ops.argmax))
            self._tables.keep_tokens(rows, out)
            return
        positions = self._inputs.positions[:size]
        self._step_ops.choose(logits, rows, positions, self._sampler, self._tables, out=out)
