"""The CUDA graphs of a model's steps."""

from __future__ import annotations

from typing import NamedTuple

from tvr.contract import Bounds
from tvr.core.batch import DeviceTables
from tvr.core.chunk_graphs import ChunkGraphs, padded
from tvr.core.decode_graphs import DecodeGraphs
from tvr.core.graph_capture import Capture, GraphJob, capture_all
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.sampler_state import SamplerState
from tvr.core.step_ops import StepOps


class StepGraphs(NamedTuple):
    """What launches the steps of a model that it holds.

    Attributes:
        decodes: of steps of decodes only.
        chunks: of small steps with prefill chunks; None: an op cannot be captured there.
    """

    decodes: DecodeGraphs
    chunks: ChunkGraphs | None

    @classmethod
    def allocate(
        cls,
        model: LlamaForCausalLM,
        ops: OpTable,
        step_ops: StepOps,
        kv_cache: KVCache,
        tables: DeviceTables,
        sampler: SamplerState,
        bounds: Bounds,
    ) -> StepGraphs:
        """Return what the graphs of steps within `bounds` read and write, and no graph yet."""
        # A graph knows addresses: nothing may move from here on.
        model.reserve(padded(bounds).max_num_tokens)
        decodes = DecodeGraphs(
            model,
            ops,
            step_ops,
            kv_cache,
            tables,
            sampler,
            max_num_seqs=bounds.max_num_seqs,
            max_seq_len=bounds.max_seq_len,
        )
        chunks = None
        if "attention_prefill" not in ops.lacking("cuda_graph"):
            max_blocks = tables.block_table.shape[1]
            chunks = ChunkGraphs(model, ops, kv_cache, bounds=bounds, max_blocks=max_blocks)
        return cls(decodes, chunks)

    def __str__(self) -> str:
        """Return the largest steps that are held, as people read them."""
        return ", or ".join(str(kind) for kind in (self.decodes, self.chunks) if kind is not None)

    def jobs(self) -> list[list[GraphJob]]:
        """Return what captures the graphs, by kind, and each kind largest first."""
        # The larger steps first: what their graphs took, the others' take again.
        return [kind.jobs() for kind in (self.chunks, self.decodes) if kind is not None]


def capture_steps(
    model: LlamaForCausalLM,
    ops: OpTable,
    step_ops: StepOps,
    kv_cache: KVCache,
    tables: DeviceTables,
    sampler: SamplerState,
    bounds: Bounds,
    capture: Capture,
) -> StepGraphs:
    """Return the captured graphs of a model, for steps within `bounds`.

    Raises:
        KernelError: a step cannot be captured.
    """
    graphs = StepGraphs.allocate(model, ops, step_ops, kv_cache, tables, sampler, bounds)
    capture_all([job for kind in graphs.jobs() for job in kind], ops, capture)
    return graphs
