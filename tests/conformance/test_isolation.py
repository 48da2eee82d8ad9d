"""A backend may crash, end, hang or shout: each costs its own case, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from support.plugins import install
from support.troubled import NAME, PID_FILE, install_troubled
from tvr.backends.torch_ref import plugin
from tvr.conformance.isolate import IsolatedSuite
from tvr.conformance.selection import Selection
from tvr.conformance.subject import Subject, device_facts
from tvr.conformance.suite import Unit, run_unit
from tvr.conformance.task import Task
from tvr.errors import BackendUnavailable, ConfigError

CHECK = "outputs_are_returned"
pytestmark = pytest.mark.slow  # every new process imports torch

#: Cases take milliseconds; only one that hangs for good takes so long.
TIMEOUT_S = 5.0
ENDS_WITHIN_S = 20.0


def task_of(backend: str, **selection: object) -> Task:
    selection = {"level": "smoke", "max_examples": 0, **selection}
    return Task(backend=backend, device="cpu", plugins=None, selection=Selection(**selection))


def is_running(pid: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip() not in ("", "Z", "Zs")


def ends_soon(pid: int) -> bool:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder on the path of this process, and so of its children, with the troubled backend."""
    folder = install_troubled(tmp_path_factory.mktemp("site"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def found(site):
    """What became of one check of each troubled op, and the process that was left behind."""
    ops = ("rms_norm", "linear", "kv_write", "rope", "argmax", "add_rms_norm", "silu_mul")
    with IsolatedSuite(task_of(NAME), timeout=TIMEOUT_S) as suite:
        results = {op: list(suite.run(Unit(op, CHECK))) for op in ops}
        left_behind = int((site / PID_FILE).read_text())  # silu_mul wrote its own over it
    return results, left_behind


def failed(found, op):
    """Return the failed results of `op`; all other cases must be there, in order and passed."""
    results, _ = found
    reference = Subject(plugin, device_facts("cpu"))
    wanted = list(run_unit(reference, Unit(op, CHECK), task_of("torch").selection))
    assert [r.case for r in results[op]] == [r.case for r in wanted]
    assert [r.text for r in results[op]] == [r.text for r in wanted]
    bad = [r for r in results[op] if r.outcome != "passed"]
    assert {r.outcome for r in bad} <= {"failed"}
    return bad


def test_a_segmentation_fault_fails_its_case_and_says_where(found):
    (result,) = failed(found, "rope")
    assert result.case == "rope-7x9-3x64-float16"
    assert result.detail.startswith("the process died: SIGSEGV\n")
    assert "tvr_troubled.py" in result.detail
    assert "in crash" in result.detail
    assert "talk" not in result.detail


def test_an_exit_fails_its_case(found):
    (result,) = failed(found, "argmax")
    assert result.detail == "the process ended with exit code 3"


def test_a_case_that_hangs_fails_after_the_timeout(found):
    (result,) = failed(found, "silu_mul")
    assert result.detail == f"no answer in {TIMEOUT_S:g} s"
    assert result.seconds >= TIMEOUT_S


def test_system_exit_is_a_failure_as_any_exception(found):
    assert {r.detail for r in failed(found, "linear")} == {"raised SystemExit: giving up"}
    assert failed(found, "linear")


def test_what_a_backend_prints_is_no_result(found):
    assert failed(found, "rms_norm") == []


def test_what_is_printed_in_a_failed_case_is_shown_with_it(found):
    (result,) = failed(found, "add_rms_norm")
    says = "raised RuntimeError: CUDA error: an illegal memory access was encountered"
    assert result.detail == f"{says}\n  it printed:\n  no longer there"


def test_after_a_lost_device_a_new_process_goes_on(found):
    (result,) = failed(found, "add_rms_norm")
    assert result.detail.startswith("raised RuntimeError: CUDA error")


def test_nothing_that_a_backend_started_outlives_the_suite(found):
    assert failed(found, "kv_write") == []
    _, left_behind = found
    assert ends_soon(left_behind)


def test_a_process_that_cannot_be_started_again_ends_the_run(site):
    with IsolatedSuite(task_of(NAME)) as suite:
        results = list(suite.run(Unit("rope_kv_write", CHECK)))
        rest = list(suite.run(Unit("rope", CHECK)))
    (site / "never_again").unlink()
    assert "ended with exit code 4" in results[-2].detail
    for result in (results[-1], *rest):
        assert result.failed
        assert "no new process could be started" in result.detail
        assert "ended with exit code 5" in result.detail


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import os\nprint('no license', flush=True)\nos._exit(7)",
            "exit code 7\n  it printed:\n  no l",
        ),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import time; time.sleep(600)", "no answer in 5 s"),
    ],
    ids=["exit", "crash", "hang"],
)
def test_a_backend_that_cannot_be_imported_is_one_error(tmp_path, monkeypatch, source, says):
    install(tmp_path, "bad", entry_points={"bad": "bad_import"}, sources={"bad_import.py": source})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match="backend 'bad'") as caught:
        IsolatedSuite(task_of("bad"), start_timeout=TIMEOUT_S)
    assert says in str(caught.value)


def test_what_the_suite_refuses_is_raised_here(site):
    task = task_of("torch", ops=("rope",), cases=("no-such-case",))
    with IsolatedSuite(task) as suite, pytest.raises(ConfigError, match="no-such-case"):
        list(suite.run(Unit("rope", CHECK)))


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_timeout_is_above_zero(timeout):
    with pytest.raises(ConfigError, match="above 0"):
        IsolatedSuite(task_of("torch"), timeout=timeout)


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_child_outlives_its_parent(site, sent, code):
    pid_file = site / PID_FILE
    pid_file.unlink(missing_ok=True)
    parent = subprocess.Popen(
        [
            *[sys.executable, "-m", "tvr", "conformance", "--backend", NAME, "--op", "silu_mul"],
            *["--check", CHECK, "--case", "silu_mul-3x1536-float16"],
        ],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not (pid_file.exists() and pid_file.read_text()) and parent.poll() is None:
        time.sleep(0.05)
    parent.send_signal(sent)
    printed, errors = parent.communicate(timeout=ENDS_WITHIN_S)
    assert parent.returncode == code
    assert errors == b""
    if sent == signal.SIGINT:
        assert printed.splitlines()[-1].startswith(b"interrupted: 1 checks were not run; 0 passed")
    else:
        assert printed == b""
    assert ends_soon(int(pid_file.read_text()))


def test_a_device_that_raises_when_asked_is_lost(monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    backend = Subject(plugin, device_facts("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert backend.answers()
    backend._on_gpu = True
    assert not backend.answers()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert backend.answers()
