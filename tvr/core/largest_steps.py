"""What an engine takes of a device besides weights and KV pool, measured before there is a pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from tvr.contract import Bounds
from tvr.core.batch import DeviceTables
from tvr.core.engine_config import EngineConfig
from tvr.core.graph_capture import Capture, CudaCapture, GraphJob, capture_all
from tvr.core.host_memory import shown_bytes
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.memory import DeviceMemory, cuda_pool_bytes
from tvr.core.ops import OpTable
from tvr.core.profile import DEAREST, TAIL_TOKENS, pack_chunks, states_of
from tvr.core.runner import ModelRunner
from tvr.core.sampler import SamplerState
from tvr.core.step_graphs import StepGraphs
from tvr.core.step_ops import StepOps

_LOG = logging.getLogger(__name__)

#: Sizes of each kind of graph that show what one more takes, besides the largest.
SAMPLED_SIZES = 2

#: What CUDA takes of a device at least, when it takes memory.
DRIVER_PIECE_BYTES = 2 << 20


class LargestSteps:
    """The largest steps there can be, on all that an engine has besides weights and workspaces.

    They are one long chunk, as many sequences as there may be with all the tokens shared out
    among them, and a chunk at the end of the longest sequence; each samples in the dearest way.
    The pool is just large enough. Tables, sampling state and, with graphs, what these read and
    write are the very objects that an engine of these bounds makes, so whoever measures the steps'
    peak has counted them.

    Args:
        model, ops, step_ops: what runs; the workspaces are allocated.
        bounds: of all steps.
        block_size: tokens in a KV block.
        device: where.
        with_graphs: whether there will be graphs.

    Attributes:
        pool_bytes: of the pool, which is not the engine's.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        ops: OpTable,
        step_ops: StepOps,
        bounds: Bounds,
        block_size: int,
        device: torch.device,
        *,
        with_graphs: bool = False,
    ) -> None:
        longest, tail = bounds.max_q_len, min(bounds.max_q_len, TAIL_TOKENS)
        share, more = divmod(bounds.max_num_tokens, bounds.max_num_seqs)
        self._steps = [
            [(0, longest)],
            [(0, min(share + (i < more), longest)) for i in range(bounds.max_num_seqs)],
            [(bounds.max_seq_len - tail, tail)],
        ]
        self._ops, self._block_size = ops, block_size
        self._num_blocks = max(sum(-(-n // block_size) for _, n in step) for step in self._steps)
        self.pool_bytes = self._num_blocks * model.config.kv_bytes_per_block(
            block_size, model.logits_dtype
        )
        kv_cache = KVCache.allocate(
            model.config, self._num_blocks, block_size, dtype=model.logits_dtype, device=device
        )
        tables = DeviceTables(
            num_rows=bounds.max_num_seqs,
            max_model_len=bounds.max_seq_len,
            block_size=block_size,
            device=device,
        )
        sampler = SamplerState(bounds.max_num_seqs, model.config.vocab_size, device)
        self._graphs: StepGraphs | None = None
        if with_graphs:
            self._graphs = StepGraphs.allocate(
                model, ops, step_ops, kv_cache, tables, sampler, bounds
            )
        self._runner = ModelRunner(model, ops, step_ops, kv_cache, tables, sampler)

    def run(self) -> None:
        """Run them op by op."""
        for chunks in self._steps:
            packed = pack_chunks(chunks, self._block_size, self._num_blocks)
            self._runner.submit(packed, states_of(len(chunks), DEAREST))()

    def graph_bytes(self, capture: Capture, memory: Callable[[], DeviceMemory]) -> int:
        """Return the bytes that all graphs will take, as some of them show that are captured.

        The largest graph of each kind takes what its ops allocate, of which the smaller ones take
        parts again, and what the driver wants at first; the next ones show what it wants for each.
        The driver takes memory in pieces, and one more may have been about to be taken.

        Args:
            capture: captures graphs, which are not kept.
            memory: returns the device's memory of the moment.

        Raises:
            KernelError: a step cannot be captured.
        """
        assert self._graphs is not None, "there are graphs to capture"
        kinds = self._graphs.jobs()
        largest = [job for jobs in kinds for job in jobs[:1]]
        others = [job for jobs in kinds for job in jobs[1:]]
        samples = [job for jobs in kinds for job in jobs[1 : 1 + SAMPLED_SIZES]]
        before = memory().taken
        capture_all(largest, self._ops, capture, doing="measuring")
        between = memory().taken
        capture_all(samples, self._ops, capture, doing="measuring")
        growth = max(0, memory().taken - between) + DRIVER_PIECE_BYTES
        of_others = growth * _num_graphs(others) // max(1, _num_graphs(samples))
        return max(0, between - before) + of_others

    def close(self) -> None:
        """Let go of all of it."""
        self._runner.close()
        del self._graphs


def measured_pool_bytes(
    config: EngineConfig,
    before: DeviceMemory,
    model: LlamaForCausalLM,
    ops: OpTable,
    step_ops: StepOps,
    bounds: Bounds,
    device: torch.device,
    *,
    with_graphs: bool,
) -> int:
    """Return the bytes left for the KV pool on a CUDA device, as the largest steps show.

    Args:
        config: for `memory_fraction` and `block_size`.
        before: the memory before the weights were loaded.
        model, ops, step_ops, bounds, device, with_graphs: see `LargestSteps`.

    Raises:
        KernelError: a step cannot be captured.
    """
    torch.cuda.reset_peak_memory_stats(device)
    steps = LargestSteps(
        model, ops, step_ops, bounds, config.block_size, device, with_graphs=with_graphs
    )
    steps.run()
    peak = torch.cuda.max_memory_allocated(device) - steps.pool_bytes
    memory = partial(DeviceMemory.of, device)
    after, graphs = memory(), 0
    if with_graphs:
        graphs = steps.graph_bytes(CudaCapture(ops.stream), memory)
        _LOG.info("set aside for CUDA graphs: %s", shown_bytes(graphs))
    steps.close()
    torch.cuda.empty_cache()
    return cuda_pool_bytes(config, before, after, peak, graphs)


def _num_graphs(jobs: Sequence[GraphJob]) -> int:
    return sum(job.num_graphs for job in jobs)
