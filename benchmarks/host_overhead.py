"""What the host does in a step, timed without a model.

    python benchmarks/host_overhead.py [--json FILE] [--check]

Two figures, apart, in processor time. *Step*: schedule + batch build + update, the mean over
steady decodes one step ahead of the device, which fill a block (and take and publish one) every 16
steps, not all in the same; held to 30 us + 0.9 us per running decode. *Text*: detokenise + stop
strings + output for one token; held to 2 us.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from tvr.core import Scheduler, Sequence
from tvr.core.batch import pack_step
from tvr.core.request import Request
from tvr.core.sampling_params import SamplingParams
from tvr.core.schedule_output import SequenceUpdate
from tvr.core.tokenizer import Tokenizer

BATCHES = (1, 8, 32, 64, 128, 256)
FIXED_US, PER_DECODE_US, TEXT_US = 30.0, 0.9, 2.0
WARM_UP, STEPS, REPEATS = 32, 320, 5


def step_us(num_seqs: int) -> float:
    """Return the mean microseconds of a step's host work with `num_seqs` running decodes."""
    length = 64 + 16 + WARM_UP + STEPS + 8
    scheduler = Scheduler(
        num_blocks=num_seqs * (length // 16 + 2),
        block_size=16,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, 64 * num_seqs),
        max_model_len=length,
        max_lag=1,
    )
    prompts = {
        f"request-{i}": [(i * 131 + j) % 1000 for j in range(64 + i % 16)] for i in range(num_seqs)
    }
    for request_id, prompt in prompts.items():
        scheduler.add(Sequence(request_id, prompt, max_tokens=length))
    next_index = [0] * num_seqs
    in_flight = []
    times = []
    for _ in range(WARM_UP + STEPS):
        began = time.thread_time()
        output = scheduler.schedule()
        if output is None:
            sys.exit("the scheduler has nothing to do; the benchmark is at fault")
        chunks = output.entries[output.num_decodes :]
        token_ids = [prompts[e.request_id][e.start : e.start + e.num_tokens] for e in chunks]
        packed = pack_step(output, token_ids, next_index)
        in_flight.append((output, packed.num_samples))
        if len(in_flight) > 1:
            done, num_samples = in_flight.pop(0)
            scheduler.update_columns(done.step_id, [7] * num_samples)
        times.append(time.thread_time() - began)
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


def main() -> None:
    """Measure, print, and with --check compare with the limits."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--check", action="store_true", help="exit with 1 past a limit")
    args = parser.parse_args()

    # The least of several means: what the work costs when nothing else disturbs the caches.
    steps = {n: sorted(step_us(n) for _ in range(REPEATS)) for n in BATCHES}
    slope, offset = np.polyfit(BATCHES, [steps[n][0] for n in BATCHES], 1)
    late = []
    print("running   step us (best, worst of means)   limit us")
    for n, values in steps.items():
        limit = FIXED_US + PER_DECODE_US * n
        print(f"{n:7}   {values[0]:12.1f} {values[-1]:12.1f} {limit:16.1f}")
        if values[0] > limit:
            late.append(f"{n} decodes take {values[0]:.1f} us, over {limit:.1f}")
    print(f"fit: {offset:.1f} us + {slope:.3f} us per running decode")

    with tempfile.TemporaryDirectory() as name:
        make_tokenizer(Path(name))
        texts = {n: sorted(text_us(Path(name), n) for _ in range(REPEATS)) for n in (100, 8000)}
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
            "step_fit_us": {"fixed": float(offset), "per_decode": float(slope)},
            "text_us": texts,
        }
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")
    for line in late:
        print(f"over the limit: {line}", file=sys.stderr)
    if args.check and late:
        sys.exit(1)


if __name__ == "__main__":
    main()
