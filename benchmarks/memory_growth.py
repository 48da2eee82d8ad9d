"""Whether an engine's memory grows with the requests that it serves.

    python benchmarks/memory_growth.py OUT.json --model DIR [--backend NAME] [--requests 10000]

Requests of random lengths (1 to 256 tokens, answers of 1 to 24; greedy, sampled, penalised, with
log-probabilities) come in turns of a thousand through one engine with dummy weights; every tenth is
aborted under way. The prefix cache is off: its index grows until every block of the pool is in it.
After each turn all blocks must have come back, and the memory of the process and of the device is
noted. Exit code 1: a block is missing, or in the second half of the turns torch came to hold more,
or the process 16 MiB more.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from pathlib import Path

import torch

from tvr import LLM, SamplingParams
from tvr.bench.report import write_json

TURN = 1000
MOST_GROWTH_MIB = 16
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "presence_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 3},
)


def serve(llm: LLM, numbers: range, rng: random.Random) -> None:
    """Serve requests of these numbers to their end, but for those aborted."""
    vocab_size = llm.parts.model_config.vocab_size
    for number in numbers:
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 256))]
        kind = KINDS[number % len(KINDS)]
        params = SamplingParams(max_tokens=rng.randint(1, 24), seed=number, ignore_eos=True, **kind)
        llm.add_request(str(number), prompt, params)
        if number % 10 == 9:
            llm.step()
            llm.abort(str(number - rng.randint(0, 5)))
    while llm.has_unfinished_requests():
        llm.step()


def memory_of(llm: LLM) -> dict[str, float]:
    """Return MiB: resident of the process, and on a GPU what torch holds and what tensors take."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"process": pages * resource.getpagesize() / 2**20}
    if llm.parts.device.type == "cuda":
        torch.cuda.synchronize()
        found["torch_reserved"] = torch.cuda.memory_reserved() / 2**20
        found["tensors"] = torch.cuda.memory_allocated() / 2**20
        free, total = torch.cuda.mem_get_info()
        found["device_used"] = (total - free) / 2**20
    return found


def faults_in(turns: list[dict[str, float]]) -> list[str]:
    """Return what grew in the second half of the turns: in the first, caches and pools may."""
    settled, last = turns[(len(turns) - 1) // 2], turns[-1]
    limits = {"process": MOST_GROWTH_MIB, "torch_reserved": 0, "tensors": 0}
    return [
        f"{name} grew from {settled[name]:.1f} to {last[name]:.1f} MiB"
        for name, most in limits.items()
        if name in last and last[name] > settled[name] + most
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=10_000)
    asked = parser.parse_args(argv)
    rng = random.Random(0)
    turns: list[dict[str, float]] = []
    with LLM(
        asked.model,
        backend=asked.backend,
        device=asked.device,
        load_format="dummy",
        enable_prefix_caching=False,
    ) as llm:
        for first in range(0, asked.requests, TURN):
            began = time.perf_counter()
            serve(llm, range(first, min(first + TURN, asked.requests)), rng)
            used = llm.stats()["num_used_blocks"]
            turns.append(memory_of(llm) | {"seconds": time.perf_counter() - began})
            print({name: round(value, 1) for name, value in turns[-1].items()}, file=sys.stderr)
            if used:
                print(f"{used} blocks did not come back", file=sys.stderr)
                return 1
        header = {
            "backend": asked.backend,
            "device": llm.parts.device.name,
            "torch": torch.__version__,
        }
        header |= {"requests": asked.requests, "unit": "MiB", "stats": dict(llm.stats())}
    write_json(asked.out, header, turns)
    for fault in (faults := faults_in(turns)):
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
