"""The device side of a step: prepare, plan, forward, sample.

On CUDA a step is launched from the engine thread and its tokens come back through pinned memory;
on CPU a worker thread runs it. Either way `submit` returns at once and steps run in order, so the
scheduler can prepare the next step meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tvr.core.batch import DeviceTables, PackedStep
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.sampler import SamplerState, sample
from tvr.core.sampling_params import SamplingParams
from tvr.errors import KernelError


@dataclass(frozen=True, kw_only=True, slots=True)
class RowState:
    """What a device row needs when a request takes it, first or again after preemption."""

    row: int
    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]


#: Waits for a step and returns its sampled tokens, one for each sampling entry; -1: no valid logit.
Pending = Callable[[], list[int]]


def on_device(
    device: torch.device, stream: torch.cuda.Stream | None
) -> AbstractContextManager[Any]:
    """Return a context in which torch allocates and launches on `device`, on `stream` if given."""
    if stream is not None:
        return torch.cuda.stream(stream)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class ModelRunner:
    """Runs packed steps on one device, in the order they are submitted."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        ops: OpTable,
        argmax: Callable[..., Tensor],
        kv_cache: KVCache,
        tables: DeviceTables,
        sampler: SamplerState,
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv_cache = kv_cache
        self._tables = tables
        self._sampler = sampler
        self._device = tables.device
        self._stream = ops.stream
        num_rows = tables.last_token.shape[0]
        self._prompt_lens = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self._argmax = argmax
        self._worker: ThreadPoolExecutor | None = None
        if self._device.type == "cpu":
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="tvr-cpu-device")

    def submit(self, packed: PackedStep, resets: Sequence[RowState]) -> Pending:
        """Start a step and return a callable that waits for its tokens.

        Args:
            packed: the step.
            resets: rows that change hands in it.

        Raises:
            Exception: whatever the step raised, from this call or from the returned one.
        """
        if self._worker is not None:
            return partial(_tokens_of, self._worker.submit(self._run, packed, resets))
        # Whichever thread this is: its current device and stream may be others.
        with on_device(self._device, self._stream):
            tokens = self._run(packed, resets)
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            on_host.copy_(tokens, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def wait() -> list[int]:
            done.synchronize()
            return on_host.tolist()

        return wait

    @torch.inference_mode()
    def _run(self, packed: PackedStep, resets: Sequence[RowState]) -> Tensor:
        """Compute one step; return its sampled tokens [R] int64."""
        for state in resets:
            # fill_: assigning a number to an element may wait for the device
            self._prompt_lens[state.row].fill_(len(state.prompt_token_ids))
            self._sampler.reset(
                state.row,
                state.params,
                state.seed,
                state.prompt_token_ids,
                state.output_token_ids,
            )
        batch, rows = self._tables.prepare_step(packed)
        self._ops.plan(batch)
        hidden = self._model.forward(batch, self._kv_cache)  # [R, hidden]
        if packed.num_samples == 0:
            return rows
        logits = self._model.compute_logits(hidden)  # [R, vocab]
        # The token after position p is output number p + 1 - prompt length.
        output_positions = batch.positions[batch.logit_rows] + 1 - self._prompt_lens[rows]
        tokens = sample(
            logits,
            self._sampler,
            rows,
            output_positions,
            self._argmax,
            host_rows=packed.sample_rows,
        )
        # A row without a valid logit gives -1, whose request will end; until then its next
        # step may already be in flight and must not index the embedding with it.
        self._tables.last_token[rows] = tokens.clamp(min=0)
        return tokens

    def close(self) -> None:
        """Wait for the steps in flight, end the worker thread and let go of model and KV pool."""
        if self._worker is not None:
            self._worker.shutdown()
        del self._model, self._kv_cache, self._tables, self._sampler, self._argmax


def _tokens_of(step: Future[Tensor]) -> list[int]:
    """Wait for a step on the worker thread and return its tokens."""
    error = step.exception()
    if error is not None and not isinstance(error, Exception):
        # A plug-in's SystemExit, say. It must not end the process from here, nor be taken for an
        # interrupt of the thread that waits.
        raise KernelError(f"the step ended by {type(error).__name__}: {error}") from error
    return step.result().tolist()
