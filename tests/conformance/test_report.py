"""Reports: text, JSON and the page, of runs that are written here by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tvr import __version__
from tvr.conformance.case import parse_case
from tvr.conformance.cases import cases
from tvr.conformance.ledger import CheckResult
from tvr.conformance.registry import CHECKS, SUBJECTS
from tvr.conformance.report import (
    format_counts,
    format_failure,
    format_results,
    reproduction,
    reproduction_in_python,
    smallest_failure,
)
from tvr.conformance.report_html import as_html, write_html
from tvr.conformance.report_json import as_json, write_json
from tvr.conformance.suite_run import SuiteRun
from tvr.contract import OPS
from tvr.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "conformance.md"
SCRIPT = "<script>alert(1)</script>"


def result(op="argmax", check="largest_logit_wins", case=None, outcome="passed", **changed):
    """What became of a check on a case, by default the first one that the op has."""
    case = cases(op, "smoke")[0] if case is None else case
    found = CheckResult(
        op=op, check=check, case=case.handle, outcome=outcome, text=case.text, seconds=0.25
    )
    return replace(found, **changed)


def a_run(*results, **changed):
    values = {
        "backend": "mine",
        "distribution": "tvr-mine",
        "version": "1.2",
        "abi": "1.0",
        "declared": ("argmax",),
        "device": "cuda:0",
        "device_name": "NVIDIA H200",
        "driver": "570.1",
        "versions": {"tvr": __version__, "python": "3.11.7"},
        "level": "quick",
        "seed": 3,
        "max_examples": None,
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 1.5,
    }
    return SuiteRun(**values | changed, results=list(results))


# --- text -------------------------------------------------------------------------------------


def test_counts_name_expected_failures_only_if_there_are():
    passed, expected = result(), result(outcome="expected")
    assert format_counts([passed, passed]) == "2 passed, 0 failed, 0 skipped"
    assert format_counts([passed, expected]) == "1 passed, 0 failed, 0 skipped, 1 expected"


def test_results_as_text_are_the_counts_and_every_failure():
    name = cases("argmax", "smoke")[0].name
    text = format_results([result(), result(outcome="failed", detail="is 3, not 4")])
    assert text.splitlines() == [
        "1 passed, 1 failed, 0 skipped",
        f"argmax: largest_logit_wins [{name}]: is 3, not 4",
    ]


def test_the_smallest_failure_is_that_of_the_fewest_elements():
    small, *_, large = sorted(cases("argmax", "smoke"), key=lambda case: case.size)
    failures = [result(case=c, outcome="failed") for c in (large, small)]
    no_case = result(case=small, outcome="failed", text="")
    assert smallest_failure([no_case, result(case=small), *failures]) == failures[1]
    assert smallest_failure([no_case]) == no_case


def test_a_reproduction_names_all_that_the_run_was_told():
    failed = result(case=parse_case("argmax", "dtype=float32 vocab_size=64 num_tokens=1"), seed=7)
    line = reproduction(
        failed, backend="mine", level="full", device="cuda:1", plugins="a b.toml", expect="e.toml"
    )
    assert line == (
        "tvr conformance --backend mine --op argmax --check largest_logit_wins "
        "--case 'dtype=float32 vocab_size=64 num_tokens=1 seed=0' --level full --seed 7 "
        "--device cuda:1 --plugins 'a b.toml' --expect e.toml"
    )
    call = reproduction_in_python(failed, backend="mine", level="full", device="cuda:1")
    assert call == (
        "check_backend(<mine>, ops=['argmax'], checks=['largest_logit_wins'], "
        "cases=['dtype=float32 vocab_size=64 num_tokens=1 seed=0'], level='full', seed=7, "
        "device='cuda:1')"
    )


def test_a_failure_of_a_whole_op_is_reproduced_without_a_check_and_a_case():
    failed = result(check="declared_op_is_checked", outcome="failed", text="")
    line = reproduction(failed, backend="mine", level="smoke")
    assert line == "tvr conformance --backend mine --op argmax --level smoke"


def test_a_failure_without_a_case_is_reproduced_with_as_many_drawn_ones():
    failed = result(outcome="failed", text="")
    line = reproduction(failed, backend="mine", level="smoke", max_examples=0)
    assert line.endswith("--check largest_logit_wins --max-examples 0 --level smoke")
    call = reproduction_in_python(failed, backend="mine", level="smoke", max_examples=0)
    assert call.endswith("checks=['largest_logit_wins'], max_examples=0, level='smoke')")


def test_a_failure_tells_its_numbers_its_line_and_a_few_of_the_others():
    failed = [
        result(case=case, outcome="failed", detail="wrong", error=0.5, limit=0.25)
        for case in cases("argmax", "quick")
    ]
    text = format_failure(failed, "the line")
    assert "error 0.5, limit 0.25 (error / limit = 2)" in text
    assert "reproduce: the line" in text
    assert text.count("also failing: ") == 8
    assert text.endswith(f"and {len(failed) - 9} more")


# --- the documents ----------------------------------------------------------------------------


def test_the_page_lists_every_check_with_its_ops_and_its_claim():
    lines = ["| check | of | claim |", "| --- | --- | --- |"]
    for check in CHECKS:
        ops = [op for op in SUBJECTS if op in check.ops]
        named = "every op" if ops == list(OPS) else ", ".join(f"`{op}`" for op in ops)
        lines.append(f"| `{check.name}` | {named} | {check.claim} |")
    right = "\n".join(lines)
    listed = DOCS.read_text().split("<!-- checks -->")[1].split("<!-- /checks -->")[0].strip()
    assert listed == right, f"put this between <!-- checks --> and <!-- /checks -->:\n{right}"


# --- JSON -------------------------------------------------------------------------------------


def test_json_has_the_documented_keys_and_says_what_was_found(tmp_path):
    run = a_run(
        result(error=0.25, limit=0.5),
        result(outcome="failed", detail="wrong", error=math.nan, limit=0.0, seed=3),
        result(outcome="skipped", detail="dtype", error=math.inf, limit=-math.inf),
    )
    write_json(tmp_path / "run.json", run)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    data = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert data == as_json(run)
    assert data["schema"] == 1
    assert data["suite_version"] == __version__
    assert (data["backend"], data["abi"], data["device"]) == ("mine", "1.0", "cuda:0")
    assert (data["driver"], data["seed"], data["ops"]) == ("570.1", 3, None)
    assert data["passed"] is False
    assert data["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "expected": 0}
    first, second, third = data["results"]
    assert (first["status"], first["error"], first["limit"]) == ("passed", 0.25, 0.5)
    assert (second["status"], second["error"], second["detail"]) == ("failed", "nan", "wrong")
    assert (third["error"], third["limit"]) == ("inf", "-inf")
    assert math.isnan(float(second["error"]))
    assert parse_case(first["op"], first["text"]).op == "argmax"

    section = DOCS.read_text().split("## The JSON report")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [*data, *first]


def test_a_report_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    for write in (write_json, write_html):
        with pytest.raises(ConfigError, match="cannot be written: No such file or directory") as e:
            write(tmp_path / "nowhere" / "report", a_run(result()))
        assert "\n" not in str(e.value)


def test_a_message_with_broken_text_is_written_all_the_same(tmp_path):
    run = a_run(result(outcome="failed", detail="\udcff\x00"))
    write_json(tmp_path / "run.json", run)
    assert json.loads((tmp_path / "run.json").read_text())["results"][0]["detail"] == "\udcff\x00"
    write_html(tmp_path / "run.html", run)
    assert "\\udcff" in (tmp_path / "run.html").read_text("utf-8")


# --- the page ---------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text of a page; refuses tags that do not nest."""

    VOID = ("meta", "br", "path", "link")

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.targets, self.open = [], [], [], []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if attrs.get("href", "").startswith("#"):
            self.targets.append(attrs["href"][1:])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def cells(self):
        return [a["aria-label"] for tag, a in self.tags if tag == "a" and "aria-label" in a]


def test_the_page_has_a_cell_for_each_op_and_check_and_its_links_lead_somewhere():
    page = Page(
        as_html(
            a_run(
                result(error=0.1, limit=1.0),
                result(outcome="skipped", detail="dtype is not declared"),
                result(check="lowest_id_wins_ties", outcome="failed", error=3.0, limit=0.0),
                result(op="rope", check="pairs_are_half_split", outcome="expected"),
            )
        )
    )
    assert page.cells() == [
        "argmax, largest_logit_wins: 1 passed, 0 failed, 1 skipped",
        "argmax, lowest_id_wins_ties: 0 passed, 1 failed, 0 skipped",
        "rope, pairs_are_half_split: 0 passed, 0 failed, 0 skipped, 1 expected",
    ]
    assert len(page.ids) == len(set(page.ids))
    assert set(page.targets) <= set(page.ids)
    for said in ("mine", "tvr-mine 1.2", "NVIDIA H200", "570.1", "quick", "dtype is not declared"):
        assert said in page.text
    assert "2026-01-02T03:04:05+00:00" in page.text


def test_failures_come_first_with_the_line_that_reproduces_them():
    page = as_html(
        a_run(result(), result(check="lowest_id_wins_ties", outcome="failed", detail="is 3"))
    )
    line = "tvr conformance --backend mine --op argmax --check lowest_id_wins_ties --case "
    assert page.index("is 3") < page.index(line) < page.index('id="grid"')
    cases_part = page[page.index('id="cases"') :]
    assert cases_part.index("lowest_id_wins_ties") < cases_part.index("largest_logit_wins")


def test_the_page_loads_nothing_and_runs_nothing():
    page = Page(as_html(a_run(result(outcome="failed", error=2.0, limit=1.0))))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "form"}
    for tag, attrs in page.tags:
        assert not {"src", "srcset"} & set(attrs), tag
        assert not [name for name in attrs if name.startswith("on")], tag
        assert attrs.get("href", "#").startswith("#")
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_text_of_a_backend_stays_text():
    nasty = f"\"'&</td></table>{SCRIPT}<img src=x onerror=alert(1)>"
    run = a_run(
        result(outcome="failed", detail=nasty, case=None),
        result(outcome="skipped", detail=nasty),
        replace(result(outcome="failed"), op=nasty, check=nasty, case=nasty, text=""),
        backend=nasty,
        distribution=nasty,
        version=nasty,
        device_name=nasty,
        driver=nasty,
        versions={nasty: nasty},
        started=nasty,
    )
    page = Page(as_html(run))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img"}
    assert page.text.count(SCRIPT) >= 8


def test_each_case_is_placed_by_its_share_of_the_limit_from_left_to_right():
    shares = [0.0, 1e-9, 0.1, 1.0, 10.0, 1e9, math.inf, math.nan]
    ticks = []
    for share in shares:
        page = as_html(a_run(result(error=share, limit=1.0)))
        (tick,) = re.findall(r'class="ticks-passed" d="M(\d+) ', page)
        ticks.append(int(tick))
    assert ticks == sorted(ticks)
    assert ticks[3] == 120  # the limit is in the middle of 240
    assert (ticks[0], ticks[1], ticks[-3:]) == (1, 1, [239, 239, 239])


def test_a_case_takes_little_of_the_page_however_long_its_message():
    found = [
        result(op=op, check=check.name, case=case, error=0.1, limit=1.0)
        for op in OPS
        for check in CHECKS
        if op in check.ops
        for case in cases(op, "quick")
    ]
    found = [*found, *(replace(r, outcome="failed", detail="wrong " * 1000) for r in found[:500])]
    assert len(found) > 5000
    assert len(as_html(a_run(*found))) < 400 * len(found)


def test_the_page_says_what_became_of_the_run():
    assert "<title>mine: passed" in as_html(a_run(result()))
    assert "<title>mine: failed" in as_html(a_run(result(), result(outcome="failed")))
    nothing = as_html(a_run(result(outcome="skipped")))
    assert "<title>mine: nothing was checked" in nothing
