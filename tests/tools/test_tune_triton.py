"""Tuning the Triton backend: what is tried, what is taken, and what the table then says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvr.backends.triton.configs import BLOCKS, key, read_table
from tvr.backends.triton.launch import Config

TOOLS = Path(__file__).parents[2] / "tools"
KEY = key("linear_plain", 90, {"dtype": "bfloat16", "rows": 1})
DEFAULT, WIDE = Config(8, 1, {"BN": 8, "BK": 2048}), Config(8, 1, {"BN": 4, "BK": 4096})
FACTS = {"gpu": "H200", "triton": "3.6.0", "torch": "2.11.0"}


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import tune_triton

    return tune_triton


def row(us: float, spread: float = 0.02) -> dict:
    return {"us": us, "p10_us": us * (1 - spread), "p90_us": us * (1 + spread)}


def test_a_candidate_is_taken_if_it_is_faster_by_more_than_the_spread(tool):
    found = tool.judge(KEY, [DEFAULT, WIDE], [[row(10.0), row(9.0)], [row(100.0), row(95.0)]], {})
    assert (found.best, found.tried, found.failed) == (WIDE, 2, {})
    assert found.us == pytest.approx((9 * 95) ** 0.5, abs=1e-3)
    assert found.default_us == pytest.approx((10 * 100) ** 0.5, abs=1e-3)


def test_within_the_spread_the_default_stays(tool):
    found = tool.judge(KEY, [DEFAULT, WIDE], [[row(10.0), row(9.8)]], {})
    assert (found.best, found.us) == (DEFAULT, 10.0)


def test_a_candidate_that_is_wrong_once_is_out(tool):
    rows = [[row(10.0), row(5.0)], [row(10.0), {"us": None, "error": "out[0] is 3, wanted 4"}]]
    found = tool.judge(KEY, [DEFAULT, WIDE], rows, {"another": "did not compile"})
    assert found.best == DEFAULT
    assert found.failed == {"another": "did not compile", str(WIDE): "out[0] is 3, wanted 4"}


def test_a_default_that_fails_ends_it(tool):
    with pytest.raises(SystemExit, match="the default of linear_plain failed: no memory"):
        tool.judge(KEY, [DEFAULT], [[{"us": None, "error": "no memory"}]], {})


def finding(tool, of: tuple, best: Config = WIDE) -> object:
    times = {"us": 9.0, "default_us": 10.0}
    return tool.Finding(key=of, default=DEFAULT, best=best, **times, tried=2, failed={})


def test_what_is_written_is_what_ops_then_find(tool):
    text = tool.merged('{"header": {}, "entries": []}', [finding(tool, KEY)], 90, FACTS)
    assert read_table(text) == {KEY: WIDE}
    (written,) = json.loads(text)["entries"]
    assert (written["us"], written["default_us"]) == (9.0, 10.0)


def test_earlier_findings_stay_but_for_those_of_other_versions(tool):
    other, on_ampere = key("linear_plain", 90, {"dtype": "float32"}), key("linear_plain", 80, {})
    text = tool.merged('{"header": {}, "entries": []}', [finding(tool, on_ampere)], 80, FACTS)
    text = tool.merged(text, [finding(tool, KEY), finding(tool, other)], 90, FACTS)
    assert set(read_table(text)) == {KEY, other, on_ampere}
    # measured again, and the default was as good
    again = tool.merged(text, [finding(tool, KEY, DEFAULT)], 90, FACTS)
    assert set(read_table(again)) == {other, on_ampere}
    newer = tool.merged(text, [finding(tool, KEY)], 90, FACTS | {"triton": "3.9.0"})
    assert set(read_table(newer)) == {KEY, on_ampere}


def test_candidates_are_possible_and_differ_from_the_default(tool):
    for name in ("linear_plain", "of a kernel without a space"):
        made = tool.candidates(name, DEFAULT)
        assert len(made) > 3
        assert DEFAULT not in made
        assert all(set(config.blocks) == {"BN", "BK"} for config in made)
        assert all(config.num_stages >= 1 and config.num_warps <= 16 for config in made)
    assert {config.num_stages for config in tool.candidates("linear_plain", DEFAULT)} == {1}


def test_every_op_looks_something_up_and_has_the_axes_of_its_space(tool):
    """A space that names a block its kernel does not have would be tried without effect."""
    cells = tool.cells_of(tool.OPS, "bfloat16", [64], on_cpu=False)
    keys = tool.keys_of(cells, tool.open_gpu("cpu"))
    assert {cell.spec.op for _, of_key in keys.values() for cell in of_key} == set(tool.OPS)
    found = {of[0]: default for of, (default, _) in keys.items()}
    assert {name: set(default.blocks) for name, default in found.items()} == BLOCKS
    for name, space in tool.SPACES.items():
        assert set(space) <= {"num_warps", "num_stages", *found[name].blocks}, name


def test_a_kernel_for_some_rows_is_judged_on_those(tool):
    keys = tool.keys_of(tool.cells_of(["linear"], "bfloat16", [], False), tool.open_gpu("cpu"))
    assert len(keys) == 20
    assert all({c.rows for c in cells} == {dict(of[2])["rows"]} for of, (_, cells) in keys.items())


def test_under_the_interpreter_everything_runs_and_nothing_is_written(tmp_path):
    out = tmp_path / "tuned.json"
    done = subprocess.run(
        [sys.executable, TOOLS / "tune_triton.py", "--op", "silu_mul", "--out", out],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("silu_mul sm_0 dtype=float32: ")
    assert first.endswith(" 0 failed")
    assert last == "times of the interpreter mean nothing: no table is written"
    assert not out.exists()
