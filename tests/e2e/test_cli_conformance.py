"""`tvr conformance`: what it says of a backend, and how it ends."""

from __future__ import annotations

import io
import json
import shlex
from contextlib import redirect_stderr

import pytest

from support.cli import refused_here, run_here
from support.plugins import install
from tvr.cli.progress import suite_bar

#: Rounds rotated heads of 96 elements a second time, and serves `argmax` right.
FAULTY = """
from dataclasses import replace

from tvr.backends.torch_ref import plugin
from tvr.contract import BackendInfo
from tvr.hookspecs import hookimpl


@hookimpl
def tvr_backend_info():
    ops = plugin.tvr_backend_info().ops
    return BackendInfo(name="faulty", abi=(1, 0), ops={op: ops[op] for op in ("rope", "argmax")})


@hookimpl
def tvr_bind_rope(spec, device):
    right = plugin.tvr_bind_rope(spec=spec, device=device)

    def run(q, k, positions, cos_sin_cache, *, q_out, k_out):
        right.run(q, k, positions, cos_sin_cache, q_out=q_out, k_out=k_out)
        return q_out.mul_(1.25), k_out

    return replace(right, run=run) if spec.head_dim == 96 else right


tvr_bind_argmax = plugin.tvr_bind_argmax
"""

EMPTY = """
from tvr.contract import BackendInfo
from tvr.hookspecs import hookimpl


@hookimpl
def tvr_backend_info():
    return BackendInfo(name="empty", abi=(1, 0))


@hookimpl
def tvr_probe(device):
    return []
"""

CHECK = "rotation_is_rounded_once"
CASES = [f"rope-5x2-2x96-{dtype}" for dtype in ("float32", "float16", "bfloat16")]
QUICKLY = ("--max-examples", 0, "--in-process")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for name, source in (("faulty", FAULTY), ("empty", EMPTY)):
        module = f"tvr_{name}"
        install(
            folder, f"tvr-{name}", entry_points={name: module}, sources={f"{module}.py": source}
        )
    return folder


@pytest.fixture(autouse=True)
def _on_path(site, monkeypatch):
    monkeypatch.syspath_prepend(site)


def conformance(backend, *options):
    return run_here("conformance", "--backend", backend, *options)


@pytest.fixture(scope="module")
def failed(site, tmp_path_factory):
    """A run in a child process that finds the fault, and its two reports."""
    folder = tmp_path_factory.mktemp("reports")
    reports = [folder / "run.json", folder / "run.html"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        done = conformance(
            "faulty",
            *("--op", "rope", "--check", f"{CHECK},outputs_are_returned", "--max-examples", 2),
            *("--json", reports[0], "--html", reports[1]),
        )
    return done, *reports


def test_a_failure_ends_with_1_and_a_table(failed):
    done, *_ = failed
    assert (done.returncode, done.stderr) == (1, "")
    table, last = done.stdout.split("\n\n")[1], done.stdout.splitlines()[-1]
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["rope"] == ["passed", "failed", "skipped"]
    assert rows["outputs_are_returned"][1:] == ["-", "-"]
    assert int(rows[CHECK][0]) > int(rows[CHECK][1]) >= len(CASES)
    assert last.startswith("FAILED: 1 of 2 checks; ")


def test_each_failing_check_is_shown_once_with_what_was_found(failed):
    blocks = [b for b in failed[0].stdout.split("\n\n") if b.startswith(f"FAILED rope: {CHECK}:")]
    (block,) = blocks
    assert "elements are off" in block
    assert "head_dim=96" in block


def test_the_printed_line_runs_just_the_smallest_failing_case_again(failed):
    done, report, _ = failed
    (line,) = (
        line for line in done.stdout.splitlines() if "tvr conformance" in line and CHECK in line
    )
    again = run_here(*shlex.split(line)[1:], "--in-process", "--json", report.with_name("2.json"))
    assert again.returncode == 1
    (result,) = json.loads(report.with_name("2.json").read_text())["results"]
    before = json.loads(report.read_text())["results"]
    same = [r for r in before if (r["check"], r["case"]) == (CHECK, result["case"])]
    assert (result["detail"], result["error"]) == (same[0]["detail"], same[0]["error"])


def test_both_reports_are_written_when_checks_fail(failed):
    _, json_file, html_file = failed
    data = json.loads(json_file.read_text())
    assert not data["passed"]
    assert data["distribution"] == "tvr-faulty"
    assert {r["case"] for r in data["results"] if r["check"] == CHECK} >= set(CASES)
    assert "rotation_is_rounded_once" in html_file.read_text()


def test_trying_whether_a_report_can_be_written_loses_nothing(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.html"
    old.write_text("before")
    refused_here("conformance", "--backend", "nothing", "--json", old, "--html", new)
    assert old.read_text() == "before"
    assert not new.exists()


def test_results_are_printed_even_if_a_report_cannot_be_written_after_all():
    done = conformance("faulty", "--op", "argmax", *QUICKLY, "--json", "/dev/full")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("passed: ")


def test_the_page_has_the_line_that_was_printed(tmp_path):
    plugins, page = tmp_path / "plugins.toml", tmp_path / "run.html"
    plugins.write_text("")
    options = ("--op", "rope", "--check", CHECK, "--plugins", plugins, "--html", page)
    done = conformance("faulty", *options, *QUICKLY)
    (line,) = (line.strip() for line in done.stdout.splitlines() if "tvr conformance" in line)
    assert f"--plugins {plugins}" in line
    assert line in page.read_text()


def test_nothing_is_left_behind_in_the_folder_one_works_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--op", "argmax", "--check", "largest_logit_wins", "--max-examples", 1)
    assert conformance("faulty", *options).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_what_passes_ends_with_0():
    done = conformance("faulty", "--op", "argmax", "--check", "largest_logit_wins", *QUICKLY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("passed: ")


def test_a_terminal_sees_how_far_it_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with redirect_stderr(terminal), suite_bar(total=4) as report:
        report(3, "1 failed, rope: rotation_is_rounded_once")
    assert "3/4" in terminal.getvalue()
    assert "1 failed, rope: rotation_is_rounded_once" in terminal.getvalue()


def test_a_child_process_finds_what_this_process_finds():
    options = ("faulty", "--op", "rope", "--check", CHECK, "--max-examples", 0)
    here, there = conformance(*options, "--in-process"), conformance(*options)
    assert here.returncode == there.returncode == 1
    assert here.stdout.splitlines()[2:] == there.stdout.splitlines()[2:]


def test_ops_that_are_not_declared_take_one_line():
    options = ("--check", "declared_support_is_bound,outputs_are_returned", *QUICKLY)
    done = conformance("faulty", *options)
    assert done.returncode == 0
    (line,) = (line for line in done.stdout.splitlines() if "linear" in line)
    assert line.startswith("not declared: rms_norm, ")
    assert "rope," not in line


def test_a_backend_that_declares_nothing_cannot_pass():
    done = conformance("empty", "--check", "outputs_are_returned", *QUICKLY)
    assert done.returncode == 1
    assert "declares no op" in done.stdout.splitlines()[-1]


def expect(tmp_path, case, reason="tracker 12"):
    file = tmp_path / "expected.toml"
    file.write_text(
        f'[[expected]]\nop = "rope"\ncheck = "{CHECK}"\ncase = "{case}"\nreason = "{reason}"\n'
    )
    return file


def test_expected_failures_let_a_run_pass_and_are_counted(tmp_path):
    options = ("--op", "rope", "--check", CHECK, *QUICKLY)
    done = conformance("faulty", *options, "--expect", expect(tmp_path, "*x96-*"))
    assert done.returncode == 0
    assert f"{len(CASES)} expected" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("case", ["*", "nowhere"])
def test_an_expected_failure_that_does_not_come_fails_the_run(tmp_path, case):
    options = ("--op", "rope", "--check", CHECK, *QUICKLY)
    done = conformance("faulty", *options, "--expect", expect(tmp_path, case))
    assert done.returncode == 1
    assert "drop the entry" in done.stdout


def test_an_expected_failure_of_an_op_that_is_not_declared_fails_a_run_of_another_op(tmp_path):
    file = tmp_path / "expected.toml"
    file.write_text('[[expected]]\nop = "linear"\ncheck = "outputs_are_returned"\nreason = "r"\n')
    options = ("--op", "argmax", "--check", "outputs_are_returned", *QUICKLY)
    done = conformance("faulty", *options, "--expect", file)
    assert done.returncode == 1
    assert "but linear is not declared; drop the entry" in done.stdout


def test_no_folder_is_made_for_a_report(tmp_path):
    for option in ("--json", "--html"):
        file = tmp_path / "new" / "report"
        line = refused_here("conformance", "--backend", "torch", option, file)
        assert f"{option} {file}: there is no folder {file.parent}" in line
    assert list(tmp_path.iterdir()) == []


def test_a_case_may_be_given_by_name_or_written_out():
    text = "dtype=float32 num_heads=1 num_kv_heads=1 head_dim=96 num_tokens=1"
    for case in (CASES[0], text):
        done = conformance(
            "faulty", "--op", "rope", "--check", CHECK, "--case", case, "--in-process"
        )
        assert done.returncode == 1
        assert "0 passed, 1 failed, 0 skipped" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--backend", "torch", "--op", "rope,roope"], "unknown op 'roope'; known: rms_norm"),
        (["--backend", "torch", "--check", "x"], "unknown check 'x'; known: declared_"),
        (["--backend", "torch", "--level", "x"], "unknown level 'x'; known: smoke, quick, full"),
        (["--backend", "torch", "--case", "x"], "name that op too"),
        (["--backend", "torch", "--op", "rope", "--case", "x", "--in-process"], "'x'"),
        (["--backend", "torch", "--op", "rope", "--check", "largest_logit_wins"], "none of the"),
        (["--backend", "nothing", "--in-process"], "backend 'nothing' is not known; known: "),
        (["--backend", "torch", "--device", "cuda:99", "--in-process"], "cuda:99"),
        (["--backend", "torch", "--timeout", "1", "--in-process"], "drop one"),
        (["--backend", "faulty", "--op", "linear", "--in-process"], "does not declare linear"),
        (["--backend", "torch", "--expect", "nowhere.toml"], "cannot be read"),
        (["--backend", "torch", "--json", "."], "is a folder"),
        (["--backend", "torch", "--json", "/proc/x.json"], "/proc/x.json cannot be written: No"),
        (["--backend", "torch", "--json", "/proc/x/y.json"], "y.json: there is no folder /proc/x"),
        (["--backend", "torch", "--html", f"{__file__}/x"], f"x: there is no folder {__file__}"),
        (["--backend", "torch", "--html", "-"], "--html - names no file, and stdout has the table"),
        (["--backend", "torch", "--op", "argmx"], "did you mean 'argmax'? unknown op 'argmx'"),
        (["--backend", "torch", "--check", "needles_found"], "did you mean 'needle_is_found'?"),
        (["--backend", "torch", "--json", "x", "--html", "./x"], "both name x"),
        (["--backend", "torch", "--replay", "x", "--seed", "3", "--op", "rope"], "--op, --seed"),
        (["--op", "rope"], "'--backend'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_ends_with_2(options, says):
    assert says in refused_here("conformance", *options)


def test_an_unavailable_backend_is_one_line_with_the_reason_from_the_child_too():
    assert "is not known; known: " in refused_here("conformance", "--backend", "nothing")


def test_without_hypothesis_one_line_says_what_to_do(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "hypothesis" else find(name)
    )
    line = refused_here("conformance", "--backend", "torch")
    assert "pip install 'tvr[conformance]'" in line
    assert "pip install -e '.[conformance]'" in line
    assert "--max-examples 0" in line
    options = ("--op", "argmax", "--check", "largest_logit_wins", *QUICKLY)
    assert conformance("faulty", *options).returncode == 0
