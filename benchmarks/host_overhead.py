"""What the host does in a step, timed without a model.

    python benchmarks/host_overhead.py [--json FILE] [--check]

Three figures, in processor time. *Step*: schedule + batch build + update, the mean over steady
decodes one step ahead of the device, which fill a block (and take and publish one) every 16 steps,
not all in the same; held to 30 us + 0.7 us per running decode. *Text*: detokenise + stop strings +
output for one token; held to 2 us. *Engine*: all of `Engine.step` with text, where a device would
take no time and to launch costs nothing; held to 40 us + 1.5 us per running decode.

As where an engine has a GPU, what is loaded is left out of garbage collections.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tvr.core import Scheduler, Sequence
from tvr.core.batch import PackedStep, pack_step
from tvr.core.decode_inputs import PackedDecodes, pack_decodes
from tvr.core.engine import Engine
from tvr.core.engine_config import EngineConfig
from tvr.core.request import Request
from tvr.core.sampling_params import SamplingParams
from tvr.core.schedule_output import SequenceUpdate
from tvr.core.step_result import StepResult
from tvr.core.tokenizer import Tokenizer

BATCHES = (1, 8, 32, 64, 128, 256)
STEP_LIMIT, ENGINE_LIMIT = (30.0, 0.7), (40.0, 1.5)  # us, fixed and per running decode
TEXT_US = 2.0
WARM_UP, STEPS, REPEATS = 32, 320, 5
LENGTH = 64 + 16 + WARM_UP + STEPS + 8


def prompts(num_seqs: int) -> dict[str, list[int]]:
    """Return prompts of 64 to 79 tokens by request id."""
    return {
        f"request-{i}": [(i * 131 + j) % 1000 for j in range(64 + i % 16)] for i in range(num_seqs)
    }


def sizes(num_seqs: int) -> dict[str, int]:
    """Return limits within which all the prompts run together to their end."""
    return {
        "num_blocks": num_seqs * (LENGTH // 16 + 2),
        "block_size": 16,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(8192, 80 * num_seqs),
        "max_model_len": LENGTH,
    }


def step_us(num_seqs: int) -> float:
    """Return the mean microseconds of a step's host work with `num_seqs` running decodes."""
    scheduler = Scheduler(**sizes(num_seqs), max_lag=1)
    asked = prompts(num_seqs)
    for request_id, prompt in asked.items():
        scheduler.add(Sequence(request_id, prompt, max_tokens=LENGTH))
    next_index = [0] * num_seqs
    in_flight = []
    times = []
    for _ in range(WARM_UP + STEPS):
        began = time.thread_time()
        output = scheduler.schedule()
        if output is None:
            sys.exit("the scheduler has nothing to do; the benchmark is at fault")
        if output.chunks:
            token_ids = [
                asked[e.request_id][e.start : e.start + e.num_tokens] for e in output.chunks
            ]
            num_samples = pack_step(output, token_ids, next_index).num_samples
        else:
            num_samples = len(pack_decodes(output.decodes, next_index).rows)
        in_flight.append((output, num_samples))
        if len(in_flight) > 1:
            done, num_samples = in_flight.pop(0)
            scheduler.update_columns(done.step_id, [7] * num_samples)
        times.append(time.thread_time() - began)
    return statistics.fmean(times[WARM_UP:]) * 1e6


class NoDevice:
    """In place of a `ModelRunner`: a step is over at once, and each of its tokens is 7."""

    def holds(self, num_decodes: int) -> bool:
        """Every step of decodes is a graph."""
        return True

    def submit_decodes(self, packed: PackedDecodes, extras: object) -> Callable[[], StepResult]:
        """Return what returns the step's result."""
        return partial(StepResult, tokens=[7] * len(packed.rows))

    def submit(
        self, packed: PackedStep, resets: object, extras: object
    ) -> Callable[[], StepResult]:
        """Return what returns the step's result."""
        return partial(StepResult, tokens=[7] * packed.num_samples)


def engine_us(directory: Path, num_seqs: int) -> float:
    """Return the mean microseconds of `Engine.step` with `num_seqs` running decodes."""
    parts = SimpleNamespace(
        tokenizer=Tokenizer.from_dir(directory),
        limits=SimpleNamespace(**sizes(num_seqs)),
        runner=NoDevice(),
        model_config=SimpleNamespace(vocab_size=1000),
        eos_token_ids=frozenset({2}),
    )
    engine = Engine(EngineConfig(), parts)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for request_id, prompt in prompts(num_seqs).items():
        engine.add_request(request_id, prompt, params)
    times = []
    for _ in range(WARM_UP + STEPS):
        began = time.thread_time()
        grown = engine.step()
        times.append(time.thread_time() - began)
    if len(grown) != num_seqs:
        sys.exit("not all requests decode together; the benchmark is at fault")
    return statistics.fmean(times[WARM_UP:]) * 1e6


def text_us(directory: Path, num_tokens: int) -> float:
    """Return the mean microseconds to turn one of `num_tokens` tokens into an output."""
    tokenizer = Tokenizer.from_dir(directory)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 256, num_tokens)]
    request = Request(
        "x",
        None,
        [1],
        SamplingParams(stop=["never said"], max_tokens=None),
        seeds=[0],
        max_tokens=num_tokens,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(),
    )
    (completion,) = request.completions
    updates = [SequenceUpdate(completion.sequence, i, None, None, None) for i in ids]
    began = time.thread_time()
    for update in updates:
        request.apply(completion, update)
    return (time.thread_time() - began) / num_tokens * 1e6


def make_tokenizer(directory: Path) -> None:
    """Write a small byte-level tokenizer."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def show(
    what: str, means: dict[int, list[float]], limit: tuple[float, float], late: list[str]
) -> dict[str, float]:
    """Print the means by running decodes, note in `late` what is over, return the straight line."""
    slope, offset = np.polyfit(list(means), [values[0] for values in means.values()], 1)
    print(f"running   {what} us (best, worst of means)   limit us")
    for n, values in means.items():
        most = limit[0] + limit[1] * n
        print(f"{n:7}   {values[0]:12.1f} {values[-1]:12.1f} {most:16.1f}")
        if values[0] > most:
            late.append(f"{what} of {n} decodes takes {values[0]:.1f} us, over {most:.1f}")
    print(f"fit: {offset:.1f} us + {slope:.3f} us per running decode")
    return {"fixed": float(offset), "per_decode": float(slope)}


def main() -> None:
    """Measure, print, and with --check compare with the limits."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--check", action="store_true", help="exit with 1 past a limit")
    args = parser.parse_args()

    gc.collect()
    gc.freeze()
    late: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        make_tokenizer(Path(name))
        # The least of several means: what the work costs when nothing else disturbs the caches.
        steps = {n: sorted(step_us(n) for _ in range(REPEATS)) for n in BATCHES}
        engines = {n: sorted(engine_us(Path(name), n) for _ in range(REPEATS)) for n in BATCHES}
        texts = {n: sorted(text_us(Path(name), n) for _ in range(REPEATS)) for n in (100, 8000)}
    step_fit = show("step", steps, STEP_LIMIT, late)
    engine_fit = show("engine", engines, ENGINE_LIMIT, late)
    for n, values in texts.items():
        print(f"text, {n} tokens: {values[0]:.2f} to {values[-1]:.2f} us a token")
        if values[0] > TEXT_US:
            late.append(f"text of {n} tokens takes {values[0]:.2f} us a token, over {TEXT_US}")

    if args.json:
        numbers = {
            "machine": platform.machine(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "command": "python benchmarks/host_overhead.py",
            "step_us": steps,
            "step_fit_us": step_fit,
            "engine_us": engines,
            "engine_fit_us": engine_fit,
            "text_us": texts,
        }
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    for line in late:
        print(f"over the limit: {line}", file=sys.stderr)
    if args.check and late:
        sys.exit(1)


if __name__ == "__main__":
    main()
