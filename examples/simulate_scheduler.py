"""Compare scheduling policies on a made-up workload: no model, no GPU, a second of your time.

    python examples/simulate_scheduler.py
    python examples/simulate_scheduler.py --rate 6 --blocks 200 --plot out.png
    python examples/simulate_scheduler.py --policies fcfs mymodule:MyPolicy

The scheduler is the real one. Only the device is a model: a step of n tokens takes a + b x n.
Standard library only, but for the picture: pip install "tvr[plot]".
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tvr.core import (
    BlockCounts,
    FirstComeFirstServed,
    Result,
    ScheduleOutput,
    Scheduler,
    SchedulingPolicy,
    Sequence,
    ShortestPromptFirst,
)
from tvr.errors import TvrError

POLICIES = {"fcfs": FirstComeFirstServed, "shortest": ShortestPromptFirst}


@dataclass(frozen=True)
class Arrival:
    """A request of the workload; `seconds` after the start it comes in."""

    seconds: float
    prompt: list[int]
    num_outputs: int


@dataclass(frozen=True)
class Device:
    """How long a step takes: `step_ms`, and `token_us` for each of its tokens."""

    step_ms: float
    token_us: float

    def seconds(self, num_tokens: int) -> float:
        return self.step_ms / 1e3 + num_tokens * self.token_us / 1e6


@dataclass
class Sample:
    """The scheduler at the beginning of a step."""

    seconds: float
    num_waiting: int
    num_running: int
    blocks: BlockCounts


@dataclass
class Life:
    """What became of one request; `spans` are (begin, end, what it was doing)."""

    arrival: Arrival
    sequence: Sequence
    token_times: list[float] = field(default_factory=list)
    spans: list[tuple[float, float, str]] = field(default_factory=list)
    state: str = "waiting"
    since: float = 0.0

    def enter(self, state: str, now: float) -> None:
        if state != self.state:
            self.spans.append((self.since, now, self.state))
            self.state, self.since = state, now


@dataclass
class Run:
    """A finished simulation."""

    policy: SchedulingPolicy
    lives: list[Life]
    samples: list[Sample]
    num_preemptions: int
    num_computed: int
    seconds: float


def make_workload(args: argparse.Namespace) -> list[Arrival]:
    """Return requests that come in at random, the same ones for the same seed."""
    rng = random.Random(args.seed)
    prefixes = [[rng.randrange(32_000) for _ in range(args.prefix)] for _ in range(3)]
    arrivals = []
    seconds = 0.0
    for _ in range(args.num_requests):
        seconds += rng.expovariate(args.rate)
        prefix = rng.choice(prefixes) if rng.random() < args.shared else []
        num_own = length(rng, args.prompt, args.max_len // 2)
        num_outputs = length(rng, args.output, args.max_len // 4)
        prompt = prefix + [rng.randrange(32_000) for _ in range(num_own)]
        arrivals.append(Arrival(seconds, prompt, num_outputs))
    return arrivals


def length(rng: random.Random, median: float, most: int) -> int:
    """Draw a length: most are short, a few are very long."""
    return max(1, min(most, round(rng.lognormvariate(math.log(median), 0.9))))


def simulate(workload: list[Arrival], policy: SchedulingPolicy, args: argparse.Namespace) -> Run:
    """Run a workload to its end. The scheduler works one step ahead of the device."""
    scheduler = Scheduler(
        num_blocks=args.blocks,
        max_num_seqs=args.rows,
        max_num_batched_tokens=args.budget,
        max_model_len=args.max_len,
        policy=policy,
    )
    device = Device(args.step_ms, args.token_us)
    lives: dict[str, Life] = {}
    samples: list[Sample] = []
    num_preemptions = num_computed = 0
    to_come = deque(workload)
    in_flight: deque[ScheduleOutput] = deque()
    now = 0.0
    while to_come or scheduler.has_unfinished or in_flight:
        while to_come and to_come[0].seconds <= now:
            arrival = to_come.popleft()
            name = str(len(lives))
            seq = Sequence(name, arrival.prompt, max_tokens=arrival.num_outputs)
            scheduler.add(seq)
            lives[name] = Life(arrival, seq, since=arrival.seconds)
        while (step := scheduler.schedule()) is not None:
            in_flight.append(step)
            num_preemptions += len(step.preempted)
            for name in step.preempted:
                lives[name].enter("preempted", now)
        if not in_flight:
            now = to_come[0].seconds
            continue
        step = in_flight.popleft()
        blocks = scheduler.block_manager.counts()
        samples.append(Sample(now, scheduler.num_waiting, scheduler.num_running, blocks))
        for entry in step.entries[step.num_decodes :]:
            lives[entry.request_id].enter("prefill", now)
        now += device.seconds(step.num_tokens)
        num_computed += step.num_tokens
        results = [Result(e.request_id, e.epoch, token=1) for e in step.entries if e.samples]
        for update in scheduler.update(step.step_id, results):
            life = lives[update.sequence.request_id]
            life.token_times.append(now)
            life.enter("done" if update.finish_reason else "decode", now)
    return Run(policy, list(lives.values()), samples, num_preemptions, num_computed, now)


def summarise(run: Run, args: argparse.Namespace) -> dict[str, str]:
    """Return the lines of the table: what was measured, and how much it was."""
    device = Device(args.step_ms, args.token_us)
    first, gaps, slowdowns = [], [], []
    for life in run.lives:
        first.append((life.token_times[0] - life.arrival.seconds) * 1e3)
        gaps += [(end - begin) * 1e3 for begin, end in pairwise(life.token_times)]
        # Against an empty machine: prefill in chunks, then a step a token.
        num_steps = math.ceil(len(life.arrival.prompt) / args.budget) + life.arrival.num_outputs - 1
        num_tokens = len(life.arrival.prompt) + life.arrival.num_outputs - 1
        alone = num_steps * device.seconds(0) + num_tokens * device.token_us / 1e6
        slowdowns.append((life.token_times[-1] - life.arrival.seconds) / alone)
    num_outputs = sum(len(life.token_times) for life in run.lives)
    num_prompt = sum(len(life.arrival.prompt) for life in run.lives)
    num_cached = sum(life.sequence.num_cached_tokens for life in run.lives)
    jain = sum(slowdowns) ** 2 / (len(slowdowns) * sum(s * s for s in slowdowns))
    return {
        "output tokens a second": f"{num_outputs / run.seconds:.0f}",
        "first token, mean ms": f"{statistics.mean(first):.0f}",
        "first token, p50 ms": f"{percentile(first, 0.5):.0f}",
        "first token, p99 ms": f"{percentile(first, 0.99):.0f}",
        "between tokens, mean ms": f"{statistics.mean(gaps or [0]):.1f}",
        "between tokens, p99 ms": f"{percentile(gaps or [0], 0.99):.1f}",
        "between tokens, longest ms": f"{max(gaps or [0]):.0f}",
        "preemptions": f"{run.num_preemptions}",
        "tokens computed": f"{run.num_computed}",
        "prompt tokens from the cache": f"{num_cached} of {num_prompt}",
        "slowdown, mean": f"{statistics.mean(slowdowns):.1f}x",
        "slowdown, worst": f"{max(slowdowns):.1f}x",
        "fairness (Jain, of slowdowns)": f"{jain:.2f}",
    }


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(runs: dict[str, Run], args: argparse.Namespace) -> str:
    """Return the table: a line for each measure, a column for each policy."""
    columns = {name: summarise(run, args) for name, run in runs.items()}
    lines = [f"{'':32}" + "".join(f"{name:>16}" for name in columns)]
    for what in next(iter(columns.values())):
        lines.append(f"{what:32}" + "".join(f"{c[what]:>16}" for c in columns.values()))
    return "\n".join(lines)


STATE_COLOURS = {  # told apart by colour-blind readers, too (Okabe and Ito)
    "waiting": "#C8C8C8",
    "prefill": "#E69F00",
    "decode": "#0072B2",
    "preempted": "#000000",
}
BLOCK_COLOURS = {"used": "#0072B2", "cached": "#56B4E9", "free": "#EDEDED"}


def plot(runs: dict[str, Run], args: argparse.Namespace, path: Path) -> None:
    """Draw each request's life, the queue and the blocks, a column for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        3,
        len(runs),
        figsize=(1.8 + 4.6 * len(runs), 8),
        height_ratios=[3, 1, 1],
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for run, (lives, queue, blocks) in zip(runs.values(), axes.T, strict=True):
        lives.set_title(type(run.policy).__name__)
        for state, colour in STATE_COLOURS.items():
            bars = [
                (number, begin, end - begin)
                for number, life in enumerate(run.lives)
                for begin, end, what in life.spans
                if what == state
            ]
            if bars:
                ys, lefts, widths = zip(*bars, strict=True)
                lives.barh(ys, widths, left=lefts, height=0.8, color=colour)
        times = [sample.seconds for sample in run.samples]
        style = {"drawstyle": "steps-post", "linewidth": 1.2}
        queue.plot(times, [s.num_waiting for s in run.samples], color="#D55E00", **style)
        queue.plot(times, [s.num_running for s in run.samples], color="#0072B2", **style)
        stacked = [
            [s.blocks.used + s.blocks.held for s in run.samples],
            [s.blocks.cached for s in run.samples],
            [s.blocks.free for s in run.samples],
        ]
        blocks.stackplot(times, stacked, colors=BLOCK_COLOURS.values(), step="post")
        blocks.set_xlabel("seconds")
    lives, queue, blocks = axes[:, 0]
    lives.set_ylabel("request, in order of arrival")
    lives.set_ylim(len(next(iter(runs.values())).lives), -1)
    queue.set_ylabel("requests")
    blocks.set_ylabel("KV blocks")
    blocks.set_ylim(0, args.blocks)
    blocks.set_xlim(0, max(run.seconds for run in runs.values()))
    legends = (STATE_COLOURS, {"waiting": "#D55E00", "running": "#0072B2"}, BLOCK_COLOURS)
    for axis, colours in zip(axes[:, -1], legends, strict=True):
        handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
        axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--plot {path}: {error}") from error


def find_policy(name: str) -> SchedulingPolicy:
    """Return a new policy: one of `POLICIES`, or MODULE:CLASS."""
    module, colon, attribute = name.partition(":")
    if not colon and name not in POLICIES:
        raise SystemExit(f"policy {name!r} is not known; use {', '.join(POLICIES)} or MODULE:CLASS")
    if not colon:
        return POLICIES[name]()
    try:
        make: Callable[[], SchedulingPolicy] = getattr(importlib.import_module(module), attribute)
        return make()
    except (ImportError, AttributeError, TypeError) as error:
        raise SystemExit(f"policy {name!r} cannot be had: {error}") from error


def count(text: str) -> int:
    """Read an argument that is a whole number above 0."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def fraction(text: str) -> float:
    """Read an argument that is a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def amount(text: str) -> float:
    """Read an argument that is a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--policies", nargs="+", default=["fcfs", "shortest"], metavar="POLICY", help="to compare")
    add("--num-requests", type=count, default=60, help="requests in all")
    add("--rate", type=amount, default=20.0, help="requests a second")
    add("--prompt", type=amount, default=120, help="median prompt tokens, without prefix")
    add("--output", type=amount, default=60, help="median output tokens")
    add("--prefix", type=count, default=96, help="tokens of a shared prefix")
    add("--shared", type=fraction, default=0.5, help="share of the requests that have one")
    add("--blocks", type=count, default=120, help="KV blocks of 16 tokens")
    add("--rows", type=count, default=16, help="most requests running at a time")
    add("--budget", type=count, default=256, help="most tokens in a step")
    add("--max-len", type=count, default=1024, help="most tokens of a request")
    add("--step-ms", type=amount, default=8.0, help="milliseconds of any step")
    add("--token-us", type=amount, default=60.0, help="microseconds more for each token")
    add("--seed", type=int, default=0, help="of the workload")
    add("--plot", type=Path, metavar="FILE", help="draw a picture, such as out.png")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('--plot needs matplotlib: pip install "tvr[plot]"')
    workload = make_workload(args)
    try:
        runs = {name: simulate(workload, find_policy(name), args) for name in args.policies}
    except TvrError as error:
        raise SystemExit(f"error: {error}") from error
    print(table(runs, args))
    if args.plot:
        plot(runs, args, args.plot)


if __name__ == "__main__":
    sys.path.insert(0, "")  # as `python -m` does: a policy may lie in the current directory
    main()
