"""What a scheduling policy costs the host, timed without a model.

    python benchmarks/policy_overhead.py

`Scheduler.schedule` alone, for 256 decodes, in processor time: steady ones with nobody waiting;
with 10,000 waiting, for whom there are rows but no blocks; and in the one step in which all need a
block and hardly any is free, so that dozens are preempted. And what a new request costs until it
is first considered, if 10,000 come at once.
"""

from __future__ import annotations

import statistics
import time

from tvr.core import (
    FirstComeFirstServed,
    PriorityFirst,
    Result,
    Scheduler,
    SchedulingPolicy,
    Sequence,
    ShortestPromptFirst,
)

RUNNING, WAITING, REPEATS = 256, 10_000, 7
PROMPT, FIRST_STEPS, STEPS = 65, 3, 10  # 65 prompt tokens take 5 blocks, as do 12 more tokens


def start(policy: SchedulingPolicy) -> Scheduler:
    """Return a scheduler with `RUNNING` decodes and a block for each of them to grow."""
    scheduler = Scheduler(
        num_blocks=RUNNING * 6 + 3,
        max_num_seqs=RUNNING + 64,
        max_num_batched_tokens=RUNNING * PROMPT,
        max_model_len=512,
        policy=policy,
    )
    for i in range(RUNNING):
        scheduler.add(Sequence(f"running-{i}", [i] * PROMPT, max_tokens=100, priority=i % 3))
    for _ in range(FIRST_STEPS):
        run_step(scheduler)
    return scheduler


def run_step(scheduler: Scheduler) -> tuple[float, int]:
    """Schedule a step and update it; return the microseconds of `schedule`, and the preempted."""
    began = time.thread_time()
    step = scheduler.schedule()
    took = time.thread_time() - began
    assert step is not None
    results = [Result(e.request_id, e.epoch, 7) for e in step.entries if e.samples]
    scheduler.update(step.step_id, results)
    return took * 1e6, len(step.preempted)


def measure(policy: SchedulingPolicy) -> list[float]:
    """Return the microseconds of the four figures, in the order of the docstring."""
    scheduler = start(policy)
    alone = statistics.fmean(run_step(scheduler)[0] for _ in range(STEPS))
    short, num_preempted = run_step(scheduler)
    while not num_preempted:
        short, num_preempted = run_step(scheduler)

    scheduler = start(policy)
    newcomers = [Sequence(f"{i}", [i % 97] * (80 + i % 200), max_tokens=9) for i in range(WAITING)]
    began = time.thread_time()
    for seq in newcomers:
        scheduler.add(seq)
    added = (time.thread_time() - began) * 1e6
    ranked, _ = run_step(scheduler)
    crowded = statistics.fmean(run_step(scheduler)[0] for _ in range(STEPS - 1))
    return [alone, crowded, short, (added + ranked - crowded) / WAITING]


def main() -> None:
    """Measure and print the least of several rounds."""
    print(f"{'microseconds':22} {'alone':>8} {'crowded':>8} {'short':>8} {'newcomer':>9}")
    for policy in (FirstComeFirstServed(), ShortestPromptFirst(), PriorityFirst()):
        rounds = zip(*(measure(policy) for _ in range(REPEATS)), strict=True)
        alone, crowded, short, newcomer = map(min, rounds)
        name = type(policy).__name__
        print(f"{name:22} {alone:8.0f} {crowded:8.0f} {short:8.0f} {newcomer:9.1f}")


if __name__ == "__main__":
    main()
