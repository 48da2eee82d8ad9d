"""Failures that are expected: strict, and each with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tvr.conformance import CheckResult
from tvr.conformance.expected import Expected, apply_expected, load_expected, of_undeclared
from tvr.errors import ConfigError

OP, CHECK = "rope", "outputs_are_returned"


def result(outcome, case="rope-a", text="dtype=float16 head_dim=96", check=CHECK):
    return CheckResult(check=check, op=OP, case=case, outcome=outcome, detail="was off", text=text)


def entry(case="*", check=CHECK):
    return Expected(op=OP, check=check, case=case, reason="tracker 12")


def outcomes(results, *entries, **options):
    return [r.outcome for r in apply_expected(results, entries, **options)]


def test_an_expected_failure_is_told_with_reason_and_finding():
    (found,) = apply_expected([result("failed")], [entry()])
    assert found.outcome == "expected"
    assert found.detail == "tracker 12: was off"
    assert not found.failed


def test_one_that_passes_is_a_failure():
    (found,) = apply_expected([result("passed")], [entry()])
    assert found.failed
    assert "tracker 12" in found.detail


def test_a_skipped_case_stays_skipped_and_does_not_satisfy_an_entry():
    skipped, unmet = apply_expected([result("skipped")], [entry()])
    assert skipped == result("skipped")
    assert unmet.failed
    assert "no such case was run" in unmet.detail


def test_an_entry_that_covers_nothing_has_the_seed_of_the_run():
    found = apply_expected([replace(result("passed"), seed=7)], [entry("rope-b")])
    assert [r.seed for r in found] == [7, 7]


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [("*", True), ("rope-*", True), ("*head_dim=96*", True), ("rope", False), ("*128*", False)],
)
def test_an_entry_covers_cases_by_a_pattern_of_name_or_text(pattern, covers):
    found = outcomes([result("failed"), result("failed", "other", "x")], entry(pattern))
    assert (found[0] == "expected") is covers


def test_an_entry_is_of_its_own_check_and_op_alone():
    other = result("failed", check="inputs_are_unchanged")
    assert outcomes([other, result("failed")], entry()) == ["failed", "expected"]


def test_an_entry_of_a_check_that_was_not_run_says_nothing():
    assert outcomes([result("passed", check="inputs_are_unchanged")], entry()) == ["passed"]


def test_an_entry_of_an_op_that_is_not_declared_is_a_failure_also_where_it_was_not_asked_for():
    other = replace(result("passed"), op="argmax")
    (found,) = of_undeclared([entry()], ["argmax"], [other], seed=7)
    assert found.failed
    assert (found.op, found.check, found.seed) == (OP, CHECK, 7)
    assert "rope is not declared; drop the entry" in found.detail
    assert of_undeclared([entry()], ["argmax", OP], [other], seed=7) == []
    model = Expected(op="engine", check="decode_equals_longer_prefill", reason="r")
    assert of_undeclared([model], ["argmax"], [other], seed=7) == []


def test_an_entry_of_an_op_that_is_not_declared_fails_once_where_it_was_asked_for():
    results = apply_expected([result("skipped")], [entry()])
    assert [r.outcome for r in results] == ["skipped", "failed"]
    assert of_undeclared([entry()], ["argmax"], results, seed=7) == []


def test_where_only_some_cases_were_run_an_entry_need_not_cover_any():
    passed = [result("passed")]
    assert outcomes(passed, entry("rope-b"), all_cases=False) == ["passed"]
    assert outcomes(passed, entry("rope-b")) == ["passed", "failed"]


def test_a_file_holds_entries(tmp_path):
    file = tmp_path / "expected.toml"
    file.write_text(
        f'[[expected]]\nop = "{OP}"\ncheck = "{CHECK}"\nreason = "tracker 12"\n'
        f'[[expected]]\nop = "{OP}"\ncheck = "{CHECK}"\ncase = "rope-b"\nreason = "tracker 12"\n'
    )
    assert load_expected(file) == [entry(), entry("rope-b")]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('op = "rope"\ncheck = "outputs_are_returned"', "reason is missing"),
        ('op = "rope"\ncheck = "outputs_are_returned"\nreason = " "', "reason is ' '"),
        ('op = "rope"\ncheck = "outputs_are_returned"\nreason = 3', "reason is 3"),
        (
            'op = "roope"\ncheck = "outputs_are_returned"\nreason = "r"',
            "did you mean 'rope'? op 'roope'",
        ),
        ('op = "rope"\ncheck = "largest_logit_wins"\nreason = "r"', "those that do: declared_"),
        ('op = "rope"\ncheck = "outputs_returned"\nreason = "r"', "mean 'outputs_are_returned'?"),
        ('op = "rope"\ncheck = "nonsense"\nreason = "r"', "those that do: declared_"),
        ('op = "rope"\nchek = "x"\nreason = "r"', "key 'chek' is not known"),
    ],
)
def test_an_entry_that_means_nothing_is_refused_in_one_line(tmp_path, lines, says):
    file = tmp_path / "expected.toml"
    good = f'[[expected]]\nop = "{OP}"\ncheck = "{CHECK}"\nreason = "r"\n'
    file.write_text(f"{good}[[expected]]\n{lines}\n")
    with pytest.raises(ConfigError, match="entry 2: ") as caught:
        load_expected(file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    ["x =", b"\xff", "expected = 3", "[[expect]]\nop = 'rope'", "", "# none", "expected = []"],
)
def test_a_file_that_holds_no_entries_is_refused(tmp_path, content):
    file = tmp_path / "expected.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="expected") as caught:
        load_expected(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_expected(tmp_path / "nowhere.toml")
