"""Tuning the Triton backend: what is tried, what is taken, and what the table then says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

from tvr.backends.triton.configs import BLOCKS, key, read_table
from tvr.backends.triton.launch import Config
from tvr.bench.op_cells import Products
from tvr.contract import OPS, DeviceFacts

TOOLS = Path(__file__).parents[2] / "tools"
KEY = key("linear_plain", 90, {"dtype": "bfloat16", "rows": 1})
DEFAULT, WIDE = Config(8, 1, {"BN": 8, "BK": 2048}), Config(8, 1, {"BN": 4, "BK": 4096})
FACTS = {"gpu": "H200", "triton": "3.6.0", "torch": "2.11.0"}


@pytest.fixture
def trials(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import triton_trials

    return triton_trials


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import tune_triton

    return tune_triton


def run_tool(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess:
    clean = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, TOOLS / "tune_triton.py", *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def row(us: float, spread: float = 0.02) -> dict:
    return {"us": us, "p10_us": us * (1 - spread), "p90_us": us * (1 + spread)}


def test_a_candidate_is_taken_if_it_is_faster_by_more_than_the_spread(trials):
    found = trials.judge(KEY, [DEFAULT, WIDE], [[row(10.0), row(9.0)], [row(100.0), row(95.0)]], {})
    assert (found.best, found.tried, found.failed) == (WIDE, 2, {})
    assert found.us == pytest.approx((9 * 95) ** 0.5, abs=1e-3)
    assert found.default_us == pytest.approx((10 * 100) ** 0.5, abs=1e-3)


def test_within_the_spread_the_default_stays(trials):
    found = trials.judge(KEY, [DEFAULT, WIDE], [[row(10.0), row(9.8)]], {})
    assert (found.best, found.us) == (DEFAULT, 10.0)


def test_a_candidate_that_is_wrong_once_is_out(trials):
    rows = [[row(10.0), row(5.0)], [row(10.0), {"us": None, "error": "out[0] is 3, wanted 4"}]]
    found = trials.judge(KEY, [DEFAULT, WIDE], rows, {"another": "did not compile"})
    assert found.best == DEFAULT
    assert found.failed == {"another": "did not compile", str(WIDE): "out[0] is 3, wanted 4"}


def test_a_default_that_fails_ends_it(trials):
    with pytest.raises(SystemExit, match="the default of linear_plain failed: no memory"):
        trials.judge(KEY, [DEFAULT], [[{"us": None, "error": "no memory"}]], {})


def finding(trials, of: tuple, best: Config = WIDE) -> object:
    times = {"us": 9.0, "default_us": 10.0}
    return trials.Finding(key=of, default=DEFAULT, best=best, **times, tried=2, failed={})


def test_what_is_written_is_what_ops_then_find(trials):
    text = trials.merged('{"header": {}, "entries": []}', [finding(trials, KEY)], 90, FACTS)
    assert read_table(text) == {KEY: WIDE}
    (written,) = json.loads(text)["entries"]
    assert (written["us"], written["default_us"]) == (9.0, 10.0)


def test_earlier_findings_stay_but_for_those_of_other_versions(trials):
    other, on_ampere = key("linear_plain", 90, {"dtype": "float32"}), key("linear_plain", 80, {})
    text = trials.merged('{"header": {}, "entries": []}', [finding(trials, on_ampere)], 80, FACTS)
    text = trials.merged(text, [finding(trials, KEY), finding(trials, other)], 90, FACTS)
    assert set(read_table(text)) == {KEY, other, on_ampere}
    # measured again, and the default was as good
    again = trials.merged(text, [finding(trials, KEY, DEFAULT)], 90, FACTS)
    assert set(read_table(again)) == {other, on_ampere}
    newer = trials.merged(text, [finding(trials, KEY)], 90, FACTS | {"triton": "3.9.0"})
    assert set(read_table(newer)) == {KEY, on_ampere}


def test_candidates_are_possible_and_differ_from_the_default(trials):
    for name in ("linear_plain", "of a kernel without a space"):
        made = trials.candidates(name, DEFAULT)
        assert len(made) > 3
        assert DEFAULT not in made
        assert all(set(config.blocks) == {"BN", "BK"} for config in made)
        assert all(config.num_stages >= 1 and config.num_warps <= 16 for config in made)
    assert {config.num_stages for config in trials.candidates("linear_plain", DEFAULT)} == {1}


def test_every_op_looks_something_up_and_has_the_axes_of_its_space(trials):
    """A space that names a block its kernel does not have would be tried without effect."""
    cells = trials.cells_of(OPS, "bfloat16", [64], on_cpu=False)
    keys = trials.keys_of(cells, trials.open_gpu("cpu"))
    assert {cell.spec.op for _, of_key in keys.values() for cell in of_key} == set(OPS)
    found = {of[0]: default for of, (default, _) in keys.items()}
    assert {name: set(default.blocks) for name, default in found.items()} == BLOCKS
    for name, space in trials.SPACES.items():
        assert set(space) <= {"num_warps", "num_stages", *found[name].blocks}, name


def test_a_kernel_for_some_rows_is_judged_on_those(trials):
    keys = trials.keys_of(
        trials.cells_of(["linear"], "bfloat16", [], False), trials.open_gpu("cpu")
    )
    assert len(keys) == 20
    assert all({c.rows for c in cells} == {dict(of[2])["rows"]} for of, (_, cells) in keys.items())


def test_products_of_another_model_are_judged_in_its_sizes(trials):
    sizes = Products(4096, 6144, 14336, 128256)
    cells = trials.cells_of(("linear", "fused_linear"), "bfloat16", (64,), False, sizes)
    down = {(cell.spec.op, cell.spec.in_features, cell.spec.out_features) for cell in cells}
    assert {("linear", 14336, 4096), ("fused_linear", 14336, 4096)} < down
    assert {n_in for _, n_in, _ in down} == {4096, 14336}


def test_under_the_interpreter_everything_runs_and_nothing_is_written(tmp_path):
    out = tmp_path / "tuned.json"
    done = run_tool("--op", "silu_mul", "--out", out, TRITON_INTERPRET="1")
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("silu_mul sm_0 dtype=float32: ")
    assert first.endswith(" 0 failed")
    assert last == "times of the interpreter mean nothing: no table is written"
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "interpreted", "says"),
    [
        ((), "", "torch sees no CUDA device; times are measured on an NVIDIA GPU"),
        (("--dtype", "float12"), "", "argument --dtype: invalid choice: 'float12'"),
        (("--op", "relu"), "1", "argument --op: invalid choice: 'relu'"),
        (("--head-dim", "48"), "1", "argument --head-dim: invalid choice: 48"),
        (("--jobs", "0"), "1", "argument --jobs: is 0; it must be 1 or more"),
        (
            ("--products", "4096,6144"),
            "1",
            "argument --products: is '4096,6144'; it must be four sizes, as in"
            " 2048,3072,8192,128256",
        ),
        (("--dtype", "bfloat16"), "1", "allowed on a CPU: float32, float16"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(arguments, interpreted, says):
    done = run_tool(*arguments, TRITON_INTERPRET=interpreted, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith("tune_triton: ")
    assert says in said


def test_without_triton_there_is_help_and_one_line(tmp_path):
    """To import it at the top had been a traceback, of --help too."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    helped = run_tool("--help", PYTHONPATH=str(tmp_path))
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--head-dim" in helped.stdout
    done = run_tool(PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tune_triton: Triton is not installed: pip install 'tvr[triton]'\n"


@pytest.fixture
def on_a_gpu(tool, trials, monkeypatch):
    """Runs the tool with an `--out`, as on a GPU where one kernel is measured."""

    def run(out: Path) -> None:
        facts = DeviceFacts(type="cuda", index=0, name="H200", sm=90)
        monkeypatch.setattr(tool, "device_to_tune", lambda: facts)
        monkeypatch.setattr(trials, "tune", lambda *_: measured.append(1) or [finding(trials, KEY)])
        monkeypatch.setattr(sys, "argv", ["tune_triton", "--op", "linear", "--out", str(out)])
        tool.main()

    measured = run.measured = []
    return run


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (None, "is not there"),
        ("{", "is broken (Expecting"),
        ('{"entries": []}', "is broken (it is"),
    ],
)
def test_a_missing_or_broken_table_is_replaced_and_told(on_a_gpu, tmp_path, capsys, before, says):
    out = tmp_path / "tuned.json"
    if before is not None:
        out.write_text(before)
    on_a_gpu(out)
    assert read_table(out.read_text()) == {KEY: WIDE}
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{out} {says}")


def test_a_good_table_is_added_to_without_a_word(on_a_gpu, trials, tmp_path, capsys):
    out, other = tmp_path / "tuned.json", key("linear_plain", 80, {})
    empty = '{"header": {}, "entries": []}'
    out.write_text(trials.merged(empty, [finding(trials, other)], 80, FACTS))
    on_a_gpu(out)
    assert set(read_table(out.read_text())) == {KEY, other}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("out", "says"), [("", "is a folder; name a file"), ("none/tuned.json", "there is no folder ")]
)
def test_before_it_measures_it_knows_that_it_can_write(on_a_gpu, tmp_path, capsys, out, says):
    with pytest.raises(SystemExit) as caught:
        on_a_gpu(tmp_path / out)
    assert (caught.value.code, on_a_gpu.measured) == (2, [])
    assert says in capsys.readouterr().err
