"""What a server costs beside its engine, at many concurrent streams.

    python benchmarks/serve_cost.py OUT.json [--streams 64] [--input-len 128] [--output-len 128]

In turns: `LLM.generate` answers requests on the demo model, and `tvr bench serve` asks a server,
whose engine has the same settings, for the same ones, all at once and streamed. The figures that
others on the machine disturb least are microseconds of processor time per token, by thread:

- `host`: the thread that schedules and makes texts; without a server and with one;
- `model`: the thread that runs the model's kernels, also of both;
- `event_loop` and `text`, which only a server has: HTTP, JSON and events; parsing and tokenising.

Tokens a second of both are noted, too; the client runs on the same machine. Linux.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tvr import LLM, SamplingParams, demo
from tvr.bench.report import write_json
from tvr.bench.workload import random_prompts
from tvr.serve.server import Server, bind, url_of
from tvr.serve.service import Service
from tvr.serve.settings import ServeSettings

VOCAB_SIZE = 2048


def open_llm(asked: argparse.Namespace) -> LLM:
    """Return an engine that runs all streams at once."""
    length = asked.input_len + asked.output_len
    return LLM(
        demo.path(),
        device="cpu",
        max_num_seqs=asked.streams,
        num_blocks=(asked.streams + 1) * -(-length // 16),
    )


def serve(asked: argparse.Namespace) -> None:
    """Serve until SIGTERM; the first line printed says where, and which threads do what."""
    with bind("127.0.0.1", 0) as sock, open_llm(asked) as llm:
        llm.generate([[2]], SamplingParams(max_tokens=1))  # the model's thread begins with it
        server = Server(Service(llm, ServeSettings(model_names=("demo",))), sock)

        def ready() -> None:
            threads = {t.name.partition("_")[0]: t.native_id for t in threading.enumerate()}
            found = {"host": threads["tvr-engine"], "model": threads["tvr-cpu-device"]}
            print(json.dumps({"url": url_of(sock), **found}), flush=True)

        server.run(ready)


def offline(llm: LLM, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    """Return what the requests cost without a server."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    began = [clock() for clock in clocks]
    outputs = llm.generate(prompts, params)
    seconds, cpu, host = (clock() - at for clock, at in zip(clocks, began, strict=True))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "offline_tokens_per_s": tokens / seconds,
        "offline_host_us": host / tokens * 1e6,
        "offline_model_us": (cpu - host) / tokens * 1e6,
    }


def cpu_by_thread(pid: int) -> dict[int, float]:
    """Return each thread's seconds of processor time."""
    return {
        int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{pid}/task").iterdir()
    }


def served(
    pid: int, facts: dict[str, Any], asked: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Return what the same requests cost with a server around the engine."""
    before = cpu_by_thread(pid)
    report = asked.out.with_suffix(".load.json")
    options = {
        "base-url": facts["url"],
        "num-prompts": asked.streams,
        "max-concurrency": asked.streams,
        "input-len": asked.input_len,
        "output-len": asked.output_len,
        "vocab-size": VOCAB_SIZE,
        "random-seed": seed,
        "json": report,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "tvr", "bench", "serve", "--ignore-eos", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (row,) = json.loads(report.read_text())["rows"]
    report.unlink()
    spent = {tid: cpu - before.get(tid, 0.0) for tid, cpu in cpu_by_thread(pid).items()}
    # The client's first request, which finds out how to ask, is not in its report.
    each = 1e6 / ((asked.streams + 1) * asked.output_len)
    host, model, loop = (spent.pop(tid) for tid in (facts["host"], facts["model"], pid))
    return {
        "served_tokens_per_s": row["output_throughput"],
        "served_host_us": host * each,
        "served_model_us": model * each,
        "event_loop_us": loop * each,
        "text_us": sum(spent.values()) * each,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.serve:
        serve(asked)
        return
    words = argv or sys.argv[1:]
    child = subprocess.Popen(
        [sys.executable, __file__, *words, "--serve"], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None, "piped"
    try:
        facts = json.loads(child.stdout.readline())
        rows = []
        with open_llm(asked) as llm:
            for number in range(-1, asked.rounds):  # the first one is to warm up
                prompts = random_prompts(asked.streams, asked.input_len, VOCAB_SIZE, number + 1)
                alone = offline(llm, prompts, asked.output_len)
                rows.append({**alone, **served(child.pid, facts, asked, number + 1)})
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)
    rows = rows[1:]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    header = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/serve_cost.py", *words]),
        "streams": asked.streams,
        "input_len": asked.input_len,
        "output_len": asked.output_len,
        "median": medians,
    }
    write_json(asked.out, header, rows)
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
