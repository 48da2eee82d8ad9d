"""`examples/simulate_scheduler.py` and `docs/scheduler.md`: they run, and say what is so."""

from __future__ import annotations

import doctest
import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "simulate_scheduler.py"
DOCS = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")

STANDARD_LIBRARY_ONLY = """
import runpy, sys

for name in ("matplotlib", "numpy", "torch"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def simulate(*args: str, cwd: Path, bare: bool = False) -> subprocess.CompletedProcess[str]:
    start = ["-c", STANDARD_LIBRARY_ONLY] if bare else []
    return subprocess.run(
        [sys.executable, *start, str(EXAMPLE), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def numbers(table: str) -> dict[str, list[str]]:
    """Return the columns of each line of a table."""
    rows = (line.rsplit(None, 2) for line in table.replace(" of ", "/").splitlines()[1:])
    return {row[0].strip(): row[1:] for row in rows}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.S)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("simulate_scheduler", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_two_policies_are_compared_with_the_standard_library_alone(tmp_path):
    done = simulate("--num-requests", "8", cwd=tmp_path, bare=True)
    assert (done.returncode, done.stderr) == (0, "")
    rows = numbers(done.stdout)
    assert len(rows) == 13
    assert all(len(row) == 2 for row in rows.values())
    assert float(rows["output tokens a second"][0]) > 0


def test_the_picture_needs_an_extra_and_says_so(tmp_path):
    done = simulate("--plot", "out.png", cwd=tmp_path, bare=True)
    assert done.returncode == 1
    assert done.stderr == '--plot needs matplotlib: pip install "tvr[plot]"\n'
    assert done.stdout == ""


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    done = simulate("--num-requests", "8", "--plot", "out.png", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    picture = (tmp_path / "out.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.parametrize("path", ["no/such/folder/out.png", "out.foo"])
def test_a_picture_that_cannot_be_written_is_refused_in_a_line(tmp_path, path):
    pytest.importorskip("matplotlib")
    done = simulate("--num-requests", "2", "--plot", path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"--plot {path}: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policies", "fast"], "policy 'fast' is not known; use fcfs, shortest or MODULE:CLASS"),
        (["--policies", "no_such_module:X"], "cannot be had: No module named 'no_such_module'"),
        (["--policies", "json:X"], "cannot be had: module 'json' has no attribute 'X'"),
        (["--policies", "json:loads"], "policy 'json:loads' cannot be had: loads() missing 1"),
        (["--policies", "math:pi"], "policy 'math:pi' cannot be had: 'float' object is not"),
        (["--shared", "2"], "argument --shared: invalid fraction value: '2'"),
        (["--prefix", "-5"], "argument --prefix: invalid count value: '-5'"),
        (["--blocks", "3"], "error: request '0' can never fit"),
        (["--num-requests", "0"], "argument --num-requests: invalid count value: '0'"),
        (["--rate", "nan"], "argument --rate: invalid amount value: 'nan'"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(example, capsys, args, message):
    with pytest.raises(SystemExit) as caught:
        example.main(args)
    said = f"{caught.value.code}\n{capsys.readouterr().err}"
    assert message in said


def test_a_policy_that_fails_ends_the_simulation_with_its_error(example, tmp_path, monkeypatch):
    (tmp_path / "failing_policy.py").write_text(
        "from tvr.core import FirstComeFirstServed\n"
        "class Failing(FirstComeFirstServed):\n"
        "    def admission_rank(self, seq):\n"
        "        return 'soon'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="error: scheduling policy Failing: admission_rank retur"):
        example.main(["--policies", "failing_policy:Failing"])


def test_a_simulation_loses_no_request_and_repeats(example):
    args = example.parse_args(["--num-requests", "40", "--blocks", "90", "--seed", "7"])
    workload = example.make_workload(args)
    assert workload == example.make_workload(args)
    for name in example.POLICIES:
        run = example.simulate(workload, example.find_policy(name), args)
        assert run.num_preemptions > 0
        for life, arrival in zip(run.lives, workload, strict=True):
            assert life.sequence.num_output_tokens == arrival.num_outputs == len(life.token_times)
            spans = life.spans
            assert spans[0][0] == arrival.seconds
            assert spans[-1][1:] == (life.token_times[-1], "decode") or len(life.token_times) == 1
            assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert all(sum(sample.blocks) == args.blocks for sample in run.samples)
        again = example.simulate(workload, example.find_policy(name), args)
        assert example.summarise(again, args) == example.summarise(run, args)


def test_a_request_alone_is_not_slowed_down(example):
    args = example.parse_args(["--num-requests", "1", "--prompt", "500", "--output", "30"])
    run = example.simulate(example.make_workload(args), example.FirstComeFirstServed(), args)
    rows = example.summarise(run, args)
    assert rows["slowdown, worst"] == rows["slowdown, mean"] == "1.0x"
    assert rows["fairness (Jain, of slowdowns)"] == "1.00"
    (life,) = run.lives
    assert [state for _, _, state in life.spans] == ["waiting", "prefill", "decode"]


def test_percentiles_are_nearest_ranks(example):
    values = [float(value) for value in range(1, 101)]
    assert example.percentile(values, 0.5) == 50
    assert example.percentile(values, 0.99) == 99
    assert example.percentile([3.0], 0.99) == 3.0


def test_the_loop_in_the_docs_runs():
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    (session,) = blocks("pycon")
    result = runner.run(parser.get_doctest(session, {}, "docs/scheduler.md", None, 0))
    assert result.failed == 0
    assert result.attempted > 8


def test_the_policy_in_the_docs_does_what_they_show(tmp_path):
    (code,) = [block for block in blocks("python") if "class Steady" in block]
    (tmp_path / "steady.py").write_text(code)
    (shown,) = [block for block in blocks("console") if "steady:Steady" in block]
    command, _, table = shown.partition("\n")
    done = simulate(*command.split()[3:], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, table)
    row = numbers(table)["between tokens, p99 ms"]
    assert float(row[1]) < 0.6 * float(row[0])


def test_the_picture_in_the_docs_is_there_and_small():
    (name,) = re.findall(r"\]\((img/.*?)\)", DOCS)
    assert 10_000 < (ROOT / "docs" / name).stat().st_size < 150_000
