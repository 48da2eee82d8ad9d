"""The device side of a step: prepare, plan, forward, sample.

On CUDA a step is launched from the engine thread and its tokens come back through pinned memory;
on CPU a worker thread runs it. Either way `submit` returns at once and steps run in order, so the
scheduler can prepare the next step meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tvr.core.batch import DeviceTables, ForwardBatch, PackedStep
from tvr.core.decode_inputs import PackedDecodes
from tvr.core.device_copy import to_device
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.logprobs import LogprobTensors
from tvr.core.ops import OpTable
from tvr.core.sampler import SamplerState, sample
from tvr.core.sampler_state import RowState
from tvr.core.step_extras import NO_EXTRAS, PromptRows, StepExtras
from tvr.core.step_graphs import StepGraphs
from tvr.core.step_ops import StepOps
from tvr.core.step_result import DeviceResult, StepResult
from tvr.core.streams import launching
from tvr.errors import KernelError

#: Waits for a step and returns its results.
Pending = Callable[[], StepResult]

#: Rows of a prompt's logits are computed this many at a time, or as many as there may be sequences
#: if that is more: so they take no more memory than sampling does.
PROMPT_LOGIT_ROWS = 64
MAX_PROMPT_LOGIT_ROWS = 1024

#: Log-probabilities of all rows are computed if more than one in this many wants them: that costs
#: less than to gather logits.
FEW_WANT_LOGPROBS = 4


def on_device(
    device: torch.device, stream: torch.cuda.Stream | None
) -> AbstractContextManager[Any]:
    """Return a context in which torch allocates and launches on `device`, on `stream` if given.

    Without one, on the device's default stream, whatever the caller's own is.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device) if stream is None else stream)


class ModelRunner:
    """Runs packed steps on one device, in the order they are submitted.

    Attributes:
        graphs: launch steps that they hold; None: every step is launched op by op.
        counts: steps so far, by whether a graph launched them: "graph" and "eager".
        last_in_graph: the last step, if all of it was a graph, its choice of tokens too; else None.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        ops: OpTable,
        step_ops: StepOps,
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
        self.graphs: StepGraphs | None = None
        self.counts: Counter[str] = Counter()
        self.last_in_graph: PackedDecodes | None = None
        num_rows = tables.spare_row
        self._prompt_logit_rows = min(max(PROMPT_LOGIT_ROWS, num_rows), MAX_PROMPT_LOGIT_ROWS)
        self._step_ops = step_ops
        self._worker: ThreadPoolExecutor | None = None
        if self._device.type == "cpu":
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="tvr-cpu-device")

    def submit(
        self, packed: PackedStep, resets: Sequence[RowState], extras: StepExtras = NO_EXTRAS
    ) -> Pending:
        """Start a step and return a callable that waits for its results.

        Args:
            packed: the step.
            resets: rows that change hands in it.
            extras: what is wanted besides tokens.

        Raises:
            Exception: whatever the step raised, from this call or from the returned one.
        """
        return self._start(partial(self._run, packed, resets, extras))

    def holds(self, num_decodes: int) -> bool:
        """Whether there is a graph for a step of so many decodes and nothing else."""
        return self.graphs is not None and self.graphs.decodes.holds(num_decodes)

    def submit_decodes(self, packed: PackedDecodes, extras: StepExtras = NO_EXTRAS) -> Pending:
        """Start a step of decodes by a graph; it must hold so many. Else as `submit`."""
        return self._start(partial(self._replay, packed, extras))

    def _start(self, step: Callable[[], DeviceResult]) -> Pending:
        if self._worker is not None:
            return partial(_result_of, self._worker.submit(step))
        # Whichever thread this is: its current device and stream may be others.
        with on_device(self._device, self._stream), launching(torch.cuda.current_device()):
            try:
                pinned = step().to_pinned()
            except SystemExit as error:
                raise _ended_by(error) from error
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def wait() -> StepResult:
            done.synchronize()
            return pinned.on_host()

        return wait

    @torch.inference_mode()
    def _run(
        self, packed: PackedStep, resets: Sequence[RowState], extras: StepExtras
    ) -> DeviceResult:
        """Compute one step."""
        self.last_in_graph = None
        # The tables first: if this step fails later on, the next one must not find the blocks of
        # those who had the rows before.
        batch, rows = self._tables.prepare_step(packed)
        self._sampler.reset(resets)
        assert batch.logit_rows is not None
        last = batch.logit_rows
        if extras.prompts:
            batch = replace(batch, logit_rows=_with_prompts(last, extras.prompts))
        # [R, hidden], then a row for each prompt token asked about
        hidden = self._forward(batch)
        num_samples = packed.num_samples
        prompt_logprobs = self._prompt_logprobs(hidden[num_samples:], extras.prompts)
        result = DeviceResult(tokens=rows, prompts=extras.prompts, prompt_logprobs=prompt_logprobs)
        if num_samples == 0:
            return result
        logits = self._model.compute_logits(hidden[:num_samples])  # [R, vocab]
        positions = batch.positions[last]
        return self._choose(result, logits, rows, positions, packed.sample_rows, extras)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states [R, hidden] of the step's `logit_rows`."""
        chunks = None if self.graphs is None else self.graphs.chunks
        if chunks is not None and chunks.holds(batch):
            self.counts["graph"] += 1
            return chunks.forward(batch)
        self.counts["eager"] += 1
        self._ops.plan(batch)
        return self._model.forward(batch, self._kv_cache)

    @torch.inference_mode()
    def _replay(self, packed: PackedDecodes, extras: StepExtras) -> DeviceResult:
        """Compute one step by a graph; tokens that it cannot choose are chosen behind it."""
        assert self.graphs is not None, "whoever submits has asked for them"
        self.counts["graph"] += 1
        graphs = self.graphs.decodes
        self.last_in_graph = None
        if graphs.chooses(packed.rows) and not extras.processed:
            tokens, logits = graphs.tokens(packed)
            self.last_in_graph = packed
            # On CUDA the copy to the host comes before the next step, which overwrites them; here
            # another thread reads them, perhaps later.
            tokens = tokens if self._worker is None else tokens.clone()
            return self._with_logprobs(DeviceResult(tokens=tokens), logits, packed.rows)
        logits, rows, positions = graphs.logits(packed)
        result = DeviceResult(tokens=rows)
        return self._choose(result, logits, rows, positions, packed.rows, extras)

    def _choose(
        self,
        result: DeviceResult,
        raw_logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        host_rows: list[int],
        extras: StepExtras,
    ) -> DeviceResult:
        """Return `result` with the tokens chosen from logits [R, vocab], and what belongs to them.

        Args:
            result: the rest of the step's results.
            raw_logits: the model's own.
            rows, positions: [R] int64, of the last token of each sequence.
            host_rows: `rows` on the host.
            extras: what is wanted besides tokens.
        """
        logits, errors = raw_logits, {}
        if extras.processed:
            logits = raw_logits.clone()
            failures = {row.sequence_id: row.apply(logits) for row in extras.processed}
            errors = {i: error for i, error in failures.items() if error is not None}
        if self._step_ops.sample is not None and self._sampler.is_usual(host_rows):
            tokens = self._step_ops.choose(
                logits, rows, positions, self._sampler, self._tables, out=torch.empty_like(rows)
            )
        else:
            argmax = self._step_ops.argmax
            output_positions = self._sampler.output_positions(rows, positions)
            tokens = sample(
                logits, self._sampler, rows, output_positions, argmax, host_rows=host_rows
            )
            self._tables.keep_tokens(rows, tokens)
        chosen = replace(result, tokens=tokens, errors=errors)
        return self._with_logprobs(chosen, raw_logits, host_rows)

    def _with_logprobs(
        self, result: DeviceResult, logits: Tensor, host_rows: list[int]
    ) -> DeviceResult:
        """Return `result` with log-probabilities of its tokens where rows ask for them.

        Args:
            result: with its tokens.
            logits: [R, vocab], the model's own.
            host_rows: the rows of the sampler.
        """
        num_tops = self._sampler.wanted_logprobs(host_rows)
        if not num_tops:
            return result
        tokens = result.tokens
        places: Sequence[tuple[int, int | None]] = list(enumerate(num_tops))
        wanted = [(place, num_top) for place, num_top in places if num_top is not None]
        if len(wanted) * FEW_WANT_LOGPROBS <= len(places):
            places = wanted
            index = to_device([place for place, _ in wanted], self._device)
            logits, tokens = logits[index], tokens[index]
        logprobs = self._room_for_logprobs(len(tokens), max(num for _, num in wanted))
        self._compute_logprobs(logits, tokens, logprobs)
        return replace(result, places=places, logprobs=logprobs)

    def _room_for_logprobs(self, num_rows: int, num_top: int) -> LogprobTensors:
        num_top = min(num_top, self._sampler.vocab_size)
        return LogprobTensors.empty(num_rows, num_top, self._device)

    def _compute_logprobs(
        self, logits: Tensor, tokens: Tensor, out: LogprobTensors, first: int = 0
    ) -> None:
        """Fill rows of `out` from `first` on with those of tokens [r] in logits [r, vocab].

        The op takes no more rows at a time than there may be sequences.
        """
        most = self._tables.spare_row
        for begin in range(0, len(tokens), most):
            rows = slice(begin, min(begin + most, len(tokens)))
            to = slice(first + rows.start, first + rows.stop)
            self._step_ops.top_logprobs(
                logits[rows],
                tokens[rows],
                ids=out.ids[to],
                values=out.values[to],
                ranks=out.ranks[to],
            )

    def _prompt_logprobs(
        self, hidden: Tensor, prompts: Sequence[PromptRows]
    ) -> LogprobTensors | None:
        """Return those of all the targets, in order; `hidden` has a row before each of them."""
        if not prompts:
            return None
        targets = to_device([token for p in prompts for token in p.targets], self._device)
        found = self._room_for_logprobs(len(targets), max(p.num_top for p in prompts))
        for first in range(0, len(targets), self._prompt_logit_rows):
            rows = slice(first, first + self._prompt_logit_rows)
            logits = self._model.compute_logits(hidden[rows])
            self._compute_logprobs(logits, targets[rows], found, first)
        return found

    def why_lost(self) -> str | None:
        """Return why the device can run no more steps; None: it can.

        Most steps that fail do so alone. But after a CUDA error such as an illegal address every
        call of the process fails, until it ends.
        """
        if self._worker is None:
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                return " ".join(str(error).split())
        return None

    def close(self) -> None:
        """Wait for the steps in flight, end the worker thread and let go of model and KV pool."""
        if self._worker is not None:
            self._worker.shutdown()
        else:
            torch.cuda.synchronize(self._device)
        self.graphs = None
        del self._model, self._kv_cache, self._tables, self._sampler, self._step_ops


def _with_prompts(logit_rows: Tensor, prompts: Sequence[PromptRows]) -> Tensor:
    """Return `logit_rows` and, behind them, the place before each target of `prompts`."""
    more = [
        torch.arange(p.first_token, p.first_token + len(p.targets), device=logit_rows.device)
        for p in prompts
    ]
    return torch.cat((logit_rows, *more))


def _result_of(step: Future[DeviceResult]) -> StepResult:
    """Wait for a step on the worker thread and return its results."""
    error = step.exception()
    if error is not None and not isinstance(error, Exception):
        raise _ended_by(error) from error
    return step.result().on_host()


def _ended_by(error: BaseException) -> KernelError:
    """Return what stands for a plug-in's SystemExit, which must not end the process from here."""
    return KernelError(f"the step ended by {type(error).__name__}: {error}")
