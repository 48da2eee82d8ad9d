"""How long a batch of requests takes: the first token of each, and each one after it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tvr.bench.comparison import says
from tvr.bench.engine_device import decode_device_ms
from tvr.bench.engine_model import BenchModel, synchronise
from tvr.bench.engine_text import check_lengths
from tvr.bench.gate_model import ModelGate, gate_lengths
from tvr.bench.model_rows import failed_row, latency_row
from tvr.bench.workload import random_prompts
from tvr.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tvr.bench.rows import Row
    from tvr.core.llm import LLM

MEASURES = ("ttft_ms", "itl_ms", "tok_s")

_BLOCK_SIZE = 16

#: Blocks of a sequence beyond those of its tokens, which the scheduler wants to see free.
_SPARE_BLOCKS = 2


class Batch(NamedTuple):
    """A batch of requests of one size, in tokens."""

    batch: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.input_len} + {self.output_len}"


@dataclass(kw_only=True)
class _Entry:
    """An engine at a batch that it has been found right for."""

    llm: LLM
    facts: dict[str, Any]
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    device_ms: list[float] = field(default_factory=list)


class Latency:
    """Measures batches on the engines of several backends, which take turns.

    Args:
        model: what is measured.
        backends: their names.
        batches: what is asked of each.
        samplings: how tokens are chosen, as parameters of `SamplingParams`, each at every batch;
            empty ones: greedily.
        num_warmup, num_iters: untimed and timed iterations.

    Raises:
        ConfigError: a batch does not fit into the context.
    """

    def __init__(
        self,
        model: BenchModel,
        backends: Sequence[str],
        batches: Sequence[Batch],
        *,
        samplings: Sequence[Mapping[str, Any]],
        num_warmup: int,
        num_iters: int,
    ) -> None:
        for b in batches:
            model.refuse_longer(f"--input-len {b.input_len}", b.input_len + b.output_len)
        self._model = model
        self._backends = backends
        self._batches = batches
        self._samplings = samplings
        self._num_warmup, self._num_iters = num_warmup, num_iters

    def rows(self) -> Iterator[list[Row]]:
        """Yield the rows of each batch and sampling, one for each backend.

        Raises:
            TvrError: the model, or its fp32 reference, cannot be loaded.
        """
        gate = ModelGate(self._model)
        engines: dict[str, LLM] = {}
        errors: dict[str, str] = {}
        try:
            for backend in self._backends:
                try:
                    engines[backend] = self._load(backend)
                except (Exception, SystemExit) as error:
                    errors[backend] = says(error)
            for batch in self._batches:
                for sampling in self._samplings:
                    yield self._measure(batch, sampling, gate, engines, errors)
        finally:
            for llm in engines.values():
                llm.close()

    def _load(self, backend: str) -> LLM:
        """Return an engine whose pool holds the largest batch, and leaves room for others'."""

        def num_blocks(num_tokens: int) -> int:
            return -(-num_tokens // _BLOCK_SIZE) + _SPARE_BLOCKS

        of_gate = sum(gate_lengths(self._model))
        longest = [max(b.input_len + b.output_len, of_gate) for b in self._batches]
        batches = [b.batch for b in self._batches]
        context = self._model.max_model_len or max(longest)
        return self._model.load(
            backend,
            context=context,
            num_blocks=max(
                num_blocks(context),
                *(b * num_blocks(n) for b, n in zip(batches, longest, strict=True)),
            ),
            num_seqs=max(batches),
        )

    def _measure(
        self,
        batch: Batch,
        sampling: Mapping[str, Any],
        gate: ModelGate,
        engines: dict[str, LLM],
        errors: dict[str, str],
    ) -> list[Row]:
        """Return the row of each backend at a batch."""
        fields = {
            name: {
                "backend": name,
                **self._model.fields,
                **batch._asdict(),
                "sampling": sampling_name(sampling),
            }
            for name in self._backends
        }
        failed = dict(errors)
        entries: dict[str, _Entry] = {}
        for name, llm in engines.items():
            try:
                entries[name] = _Entry(llm=llm, facts=gate.facts(llm, name, batch.batch))
            except (Exception, SystemExit) as error:
                failed[name] = says(error)
        # Where no engine could be loaded, the batch may be too large for its prompts, too.
        vocab_size, num = self._model.config.vocab_size, batch.batch if entries else 0
        prompts = random_prompts(num, batch.input_len, vocab_size, 0)
        for i in range(self._num_warmup + self._num_iters):
            for name, entry in list(entries.items()):
                try:
                    first, whole = answered(entry.llm, prompts, batch.output_len, sampling)
                except (Exception, SystemExit) as error:
                    failed[name] = says(error)
                    del entries[name]
                    continue
                if i >= self._num_warmup:
                    entry.first.append(first)
                    entry.whole.append(whole)
        for name, entry in entries.items():
            try:
                entry.device_ms = decode_device_ms(entry.llm, prompts, batch.output_len, sampling)
            except (Exception, SystemExit) as error:
                failed[name] = says(error)
        return [
            failed_row(fields[name], MEASURES, failed[name])
            if name in failed
            else _row(fields[name], entries[name])
            for name in self._backends
        ]


def _row(fields: dict[str, Any], entry: _Entry) -> Row:
    return latency_row(fields, entry.first, entry.whole, entry.facts, device_ms=entry.device_ms)


def sampling_name(sampling: Mapping[str, Any]) -> str:
    """Return what rows call the way in which tokens are chosen."""
    return ", ".join(f"{name}={value}" for name, value in sampling.items()) or "greedy"


def answered(
    llm: LLM, prompts: Sequence[list[int]], output_len: int, sampling: Mapping[str, Any]
) -> tuple[float, float]:
    """Return the seconds until every request has its first token, and until all have ended.

    Raises:
        CheckFailed: an answer ended otherwise than by its length.
    """
    chosen = {"temperature": 0.0, **sampling}
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, **chosen)
    synchronise(llm)
    began = time.monotonic()
    outputs = llm.generate(prompts, params)
    check_lengths(outputs)
    metrics = [output.metrics for output in outputs]
    first = max(m.first_token_time for m in metrics if m.first_token_time is not None)
    ended = max(m.finished_time for m in metrics if m.finished_time is not None)
    return first - began, ended - began


def timed(llm: LLM, prompts: Sequence[list[int]], output_lens: Sequence[int]) -> float:
    """Return the seconds in which an engine answers greedily with so many tokens each.

    Raises:
        CheckFailed: an answer ended otherwise.
    """
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in output_lens]
    synchronise(llm)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    synchronise(llm)
    took = time.perf_counter() - began
    check_lengths(outputs)
    return took
