"""The README's results: made from the files of `tvr bench`, and equal to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tvr.errors import ConfigError

ROOT = Path(__file__).parents[2]

README = "# x\n\n## Use\n\nSo.\n\n## Honest limits\n\n- Slow.\n"

HEADER = {
    "command": "tvr bench latency --model m --json latency.json",
    "date": "2030-01-02T03:04:05+00:00",
    "device_name": "A GPU",
    "driver": "1.2",
    "versions": {"tvr": "9.9", "torch": "8.8"},
}
MODEL = {"model": "m", "load_format": "dummy", "dtype": "bfloat16"}


def latency(backend, batch, ttft_ms, itl_ms, tok_s, **more):
    sizes = {"batch": batch, "input_len": 4096, "output_len": 64}
    figures = {"ttft_ms": ttft_ms, "itl_ms": itl_ms, "tok_s": tok_s}
    return {"backend": backend, **MODEL, **sizes, **figures, **more}


LATENCY = [
    latency("a", 1, 12.345, 1.0567, 946.34),
    latency("b", 1, 1234.5, 2.0, 500.0),
    latency("a", 32, 99.99, 10.0, 3200.4),
    latency("b", 32, None, None, None, error="is off"),
    latency("a", 8, 5.0, 1.0, 8000.0),
]
THROUGHPUT = [
    {"backend": "a", **MODEL, "workload": "nano", "output_tok_s": 42000.4, "seconds": 3.1897},
    {"backend": "b", **MODEL, "workload": "nano", "output_tok_s": 9.0, "seconds": 1e3},
]

SECTION = """\
<!-- results: made by tools/results_table.py from benchmarks/results -->

## Results

One A GPU (driver 1.2), 2030-01-02: tvr 9.9, torch 8.8.

In `benchmarks/models`, which has the shapes of these models and no weights:

```bash
tvr bench latency --model m --json latency.json
tvr bench throughput --model m
```

**m, bfloat16, random weights.** A batch of equal requests:

| batch | prompt | answer | a TTFT ms | a ITL ms | a tok/s | b TTFT ms | b ITL ms | b tok/s |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 1 | 4,096 | 64 | 12.3 | 1.06 | 946 | 1,234 | 2.00 | 500 |
| 32 | 4,096 | 64 | 100.0 | 10.0 | 3,200 | failed | failed | failed |
| 8 | 4,096 | 64 | 5.00 | 1.00 | 8,000 | - | - | - |

**m, bfloat16, random weights.** All requests at once:

| workload | backend | new tokens/s | seconds |
| --- | --- | ---: | ---: |
| nano | a | 42,000 | 3.19 |
| nano | b | 9 | 1000.00 |

![ITL against batch and context, beside the memory's limit](benchmarks/results/h200/itl.png)

`docs/benchmarks.md` says how it was measured. <!-- /results -->

"""


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import results_table

    return results_table


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "h200"
    folder.mkdir(parents=True)
    write(folder / "latency.json", LATENCY)
    write(folder / "throughput.json", THROUGHPUT, command="tvr bench throughput --model m")
    (folder / "itl.png").touch()
    return folder


def write(file, rows, **changed):
    file.write_text(json.dumps({"header": {**HEADER, **changed}, "rows": rows}))


def test_readme_is_what_the_files_give(tool):
    """Run `python tools/results_table.py` when this fails."""
    if not tool.RESULTS.parent.exists():
        pytest.skip("a source distribution leaves the results out")
    readme = (ROOT / "README.md").read_text("utf-8")
    assert tool.updated(readme, tool.RESULTS) == readme


def test_the_section_stands_before_the_limits(tool, results, tmp_path):
    before, after = README.split("## Honest limits")
    expected = before + SECTION + "## Honest limits" + after
    assert tool.updated(README, results, tmp_path) == expected
    assert tool.updated(expected, results, tmp_path) == expected


def test_another_figure_makes_another_readme(tool, results, tmp_path):
    readme = tool.updated(README, results, tmp_path)
    write(results / "latency.json", [{**LATENCY[0], "itl_ms": 1.07}, *LATENCY[1:]])
    changed = tool.updated(readme, results, tmp_path)
    assert changed != readme
    assert "| 12.3 | 1.07 | 946 |" in changed


def test_without_files_there_is_no_section(tool, results, tmp_path):
    readme = tool.updated(README, results, tmp_path)
    shutil.rmtree(results)
    assert tool.updated(readme, results, tmp_path) == README


def test_one_file_is_enough_and_other_hardware_is_said(tool, results, tmp_path):
    write(results / "throughput.json", THROUGHPUT, device_name="Another", driver=None)
    text = tool.section(results, tmp_path)
    assert "One A GPU (driver 1.2), 2030-01-02: tvr 9.9, torch 8.8.\nOne Another, 2030" in text
    (results / "latency.json").unlink()
    text = tool.section(results, tmp_path)
    assert "A GPU" not in text
    assert "| nano | a | 42,000 | 3.19 |" in text


def test_a_file_without_results_is_an_error(tool, results, tmp_path):
    (results / "latency.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"latency\.json holds no results"):
        tool.updated(README, results, tmp_path)


def test_check_tells_of_a_difference_and_changes_nothing(
    tool, results, tmp_path, monkeypatch, capsys
):
    (tmp_path / "README.md").write_text(README)
    monkeypatch.setattr(tool, "README", tmp_path / "README.md")
    monkeypatch.setattr(tool, "RESULTS", results)
    monkeypatch.setattr(
        tool, "updated", lambda readme, folder, f=tool.updated: f(readme, folder, tmp_path)
    )
    assert tool.main(["--check"]) == 1
    assert "differ" in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text() == README
    assert tool.main([]) == 0
    assert SECTION in (tmp_path / "README.md").read_text()
    assert tool.main(["--check"]) == 0


def test_the_models_of_the_commands_are_where_the_readme_says(tool):
    if not tool.RESULTS.parent.exists():
        pytest.skip("a source distribution leaves the results out")
    for file in ("latency.json", "latency-8b.json", "throughput.json"):
        rows = json.loads((tool.RESULTS / file).read_text("utf-8"))["rows"]
        for model in {row["model"] for row in rows}:
            assert (ROOT / "benchmarks" / "models" / model / "config.json").exists()
