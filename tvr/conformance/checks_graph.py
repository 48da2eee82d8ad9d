"""Claims about an op in a CUDA graph, where only device data varies between replays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tvr.conformance import graphs
from tvr.conformance.accuracy import require_right
from tvr.conformance.attending import BOTH
from tvr.conformance.inputs import make_call
from tvr.conformance.ledger import Check
from tvr.conformance.lengths import (
    fewer_rows,
    length_sweep,
    longest_everywhere,
    room_for,
)
from tvr.conformance.padded import PaddedRunner
from tvr.contract import OPS

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject


def check_run_is_captured_whole(backend: Subject, case: Case) -> None:
    """`run` does nothing that a capture forbids, and a replay launches all that it launched."""
    replayed = _graph_of(backend, case, [case])
    require_right(backend.with_runner(replayed), case)


def check_replay_reads_the_data_of_its_step(backend: Subject, case: Case) -> None:
    """A replay computes from what the inputs, positions, slots and tables hold by then."""
    steps = [replace(case, seed=case.seed + i) for i in range(3)]
    replayed = _graph_of(backend, case, steps)
    for step in steps:
        require_right(backend.with_runner(replayed), step)


def check_replay_ignores_padding_rows(backend: Subject, case: Case) -> None:
    """A graph serves fewer rows than it was captured for; the others may hold NaN."""
    steps = [case, *fewer_rows(case), case]
    replayed = _graph_of(backend, case, steps)
    for step in steps:
        require_right(backend.with_runner(replayed), step)


def check_replay_follows_the_lengths(backend: Subject, case: Case) -> None:
    """A graph is right for every length up to its bound, planned with real sizes or the bounds."""
    steps = length_sweep(case)
    replayed = _graph_of(backend, case, steps)
    for with_bounds in (False, True):
        replayed.plans_with_bounds = with_bounds
        for step in steps:
            require_right(backend.with_runner(replayed), step)


def check_replay_plans_for_its_lengths(backend: Subject, case: Case) -> None:
    """A graph that has the plan in it is right for every length up to its bound."""
    steps = length_sweep(case)
    replayed = PaddedRunner(backend, case.spec, room_for(steps), captured=True, with_plan=True)
    for step in steps:
        require_right(backend.with_runner(replayed), step)


def check_steps_between_replays_do_no_harm(backend: Subject, case: Case) -> None:
    """A graph is right after another step was planned and run eagerly on the same workspace."""
    other = replace(longest_everywhere(case), seed=case.seed + 1)
    replayed = _graph_of(backend, case, [case, other])

    def after_another_step(call: Call) -> None:
        replayed.binding(make_call(other, backend.torch_device))
        replayed(call)

    for _ in range(2):
        require_right(backend.with_runner(after_another_step), case)


def check_host_sizes_may_be_bounds(backend: Subject, case: Case) -> None:
    """Planned and run with the bounds as host integers, an op goes by the lengths on the device."""
    steps = [case, *fewer_rows(case), longest_everywhere(case), case]
    padded = PaddedRunner(backend, case.spec, room_for(steps), captured=False)
    padded.plans_with_bounds = True
    for step in steps:
        require_right(backend.with_runner(padded), step)


def needs_graph(backend: Subject, case: Case) -> list[str]:
    """Return why there is no graph to check."""
    return graphs.why_not(backend)


def _graph_of(backend: Subject, case: Case, steps: list[Case]) -> PaddedRunner:
    return PaddedRunner(backend, case.spec, room_for(steps), captured=True)


CHECKS = (
    *(
        Check(run=run, ops=OPS, flag="cuda_graph", needs=needs_graph)
        for run in (
            check_run_is_captured_whole,
            check_replay_reads_the_data_of_its_step,
            check_replay_ignores_padding_rows,
            check_steps_between_replays_do_no_harm,
        )
    ),
    Check(run=check_replay_follows_the_lengths, ops=BOTH, flag="cuda_graph", needs=needs_graph),
    Check(
        run=check_replay_plans_for_its_lengths, ops=BOTH, flag="plan_in_graph", needs=needs_graph
    ),
    Check(run=check_host_sizes_may_be_bounds, ops=BOTH, flag="cuda_graph"),
)
