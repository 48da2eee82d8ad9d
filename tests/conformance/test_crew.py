"""Several child processes find what one finds, and share its troubles."""

from __future__ import annotations

import pytest

from support.troubled import NAME, install_troubled
from tvr.conformance.crew import Crew, default_jobs, num_cores
from tvr.conformance.selection import Selection
from tvr.conformance.suite import units
from tvr.conformance.task import Task
from tvr.errors import BackendUnavailable, ConfigError

pytestmark = pytest.mark.slow  # every new process imports torch

TIMEOUT_S = 5.0


def task_of(backend: str, **selection: object) -> Task:
    chosen = Selection(level="smoke", max_examples=0, **selection)
    return Task(backend=backend, device="cpu", plugins=None, selection=chosen)


def outcomes(task: Task, jobs: int) -> dict[tuple[str, ...], str]:
    with Crew(task, jobs=jobs, timeout=TIMEOUT_S) as crew:
        ended = list(crew.run(units(task.selection)))
    assert {unit for unit, _ in ended} == set(units(task.selection))
    return {(r.op, r.check, r.case): r.outcome for _, results in ended for r in results}


def test_two_children_find_what_one_finds(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install_troubled(tmp_path))
    task = task_of(NAME, ops=("rms_norm", "rope"), checks=("outputs_are_returned",))
    alone = outcomes(task, 1)
    assert outcomes(task, 2) == alone
    assert {"passed", "failed"} <= set(alone.values())


def test_what_a_unit_is_refused_for_is_raised_where_results_are_awaited():
    task = task_of("torch", ops=("rope",), cases=("no-such-case",))
    with Crew(task, jobs=2, timeout=TIMEOUT_S) as crew, pytest.raises(ConfigError, match="no-such"):
        list(crew.run(units(task.selection)))


def test_a_backend_that_is_not_there_is_one_error():
    with pytest.raises(BackendUnavailable, match="'nobody' is not known"):
        Crew(task_of("nobody"), jobs=2, timeout=TIMEOUT_S)


def test_there_is_at_least_one_job():
    with pytest.raises(ConfigError, match="0 jobs; there must be at least one"):
        Crew(task_of("torch"), jobs=0, timeout=TIMEOUT_S)


def test_a_gpu_is_not_shared_unasked():
    assert default_jobs("cuda:0") == 1
    assert 1 <= default_jobs("cpu") <= num_cores()
