"""Drawn cases find what no named case has, and come down to a small one that says it."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from support.fakes import CPU
from tvr.backends.torch_ref import plugin
from tvr.conformance import check_backend, drawing, format_results, strategies
from tvr.conformance.case import Case, parse_case
from tvr.conformance.cases import cases
from tvr.conformance.drawn import judge_drawn
from tvr.conformance.registry import CHECKS
from tvr.conformance.selection import Selection
from tvr.conformance.subject import Subject
from tvr.contract import OPS, BackendInfo, Box, RmsNormSpec, why_not
from tvr.errors import ConfigError
from tvr.hookspecs import hookimpl


def wrapped(op, wrong):
    """The reference, but for calls of `op` with arguments for which `wrong(spec, args)`."""
    right = getattr(plugin, f"tvr_bind_{op}")

    @hookimpl
    def bind(spec, device):
        bound = right(spec=spec, device=device)

        def run(*args, **kwargs):
            bound.run(*args, **kwargs)
            if wrong(spec, args):
                kwargs["out"].add_(1)
            return kwargs["out"]

        return replace(bound, run=run)

    hooks = {name: value for name, value in vars(plugin).items() if name.startswith("tvr_")}
    return SimpleNamespace(**hooks | {f"tvr_bind_{op}": bind})


def test_a_fault_outside_all_named_cases_is_found_and_shrunk():
    backend = wrapped("rms_norm", lambda spec, args: spec.hidden_size > 48 and len(args[0]) == 4)
    results = check_backend(
        backend, ops=["rms_norm"], checks=["norm_rounds_where_declared"], max_examples=200
    )
    (failed,) = [r for r in results if r.failed]
    case = parse_case("rms_norm", failed.case)
    # The smallest of its kind: 56 is the first width above 48 that is a multiple of 8.
    assert (case.num_tokens, case.spec.hidden_size, case.seed) == (4, 56, 0)
    assert failed.text == failed.case
    again = check_backend(
        backend, ops=["rms_norm"], checks=["norm_rounds_where_declared"], cases=[failed.case]
    )
    assert [r.detail for r in again] == [failed.detail]


def test_equal_seeds_draw_equal_cases_and_others_draw_others():
    def drawn(seed):
        seen = []
        drawing.find_failure(
            strategies.any_cases("rope", "quick"), seen.append, seed=seed, max_examples=10
        )
        return seen

    assert drawn(1) == drawn(1) != drawn(2)


def test_one_case_beside_the_simplest_is_drawn_and_depends_on_the_seed():
    """hypothesis begins with the simplest case, whatever the seed: alone it would say nothing."""
    drawn = set()
    for seed in range(5):
        seen = []
        drawing.find_failure(
            strategies.any_cases("rms_norm", "quick"), seen.append, seed=seed, max_examples=1
        )
        assert len(seen) == 2
        drawn.add(seen[1])
    assert len(drawn) == 5


def test_what_a_seed_draws_does_not_depend_on_the_modules_at_hand(tmp_path, monkeypatch):
    """Else an edit of the backend under test would change what it is tested on."""

    def drawn():
        seen = []
        for op in OPS:
            drawing.find_failure(
                strategies.any_cases(op, "full"), seen.append, seed=1, max_examples=30
            )
        return seen

    before = drawn()
    file = tmp_path / "full_of_numbers.py"
    file.write_text(f"NUMBERS = {[*range(1, 400), *range(400, 36000, 200)]}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, file.stem, module)
    assert drawn() == before


def test_each_check_draws_cases_of_its_own():
    calls = {}

    def note(spec, args):
        calls.setdefault(len(calls), (spec, args[0].shape))

    def shapes(check):
        calls.clear()
        check_backend(wrapped("silu_mul", note), ops=["silu_mul"], checks=[check])
        return set(calls.values())

    assert shapes("outputs_are_returned") != shapes("inputs_are_unchanged")


def narrow(op, *boxes, bind=None):
    """A backend that declares these boxes of `op` alone, bound as the reference binds it."""
    info = BackendInfo(name="narrow", abi=(1, 0), ops={op: list(boxes)})
    hook = getattr(plugin, f"tvr_bind_{op}") if bind is None else hookimpl(bind)
    return SimpleNamespace(tvr_backend_info=hookimpl(lambda: info), **{f"tvr_bind_{op}": hook})


@pytest.mark.parametrize(
    ("op", "axes"),
    [
        ("rope", {"head_dims": [66], "fields": frozenset({"rotary_dim"})}),
        ("rope", {"head_dims": [63, 64]}),
        ("kv_write", {"block_sizes": [16, 24]}),
        ("kv_write", {"block_sizes": [24]}),
        ("linear", {"weight_formats": ["dense", "int4"]}),
    ],
)
def test_declared_values_that_no_case_can_have_do_not_stop_the_suite(op, axes):
    backend = narrow(op, Box(dtypes=["float32"], devices=["cpu"], **axes))
    results = check_backend(backend, ops=[op], checks=["outputs_are_returned"])
    assert not [r for r in results if r.failed], format_results(results)


def test_a_claim_of_a_box_without_named_cases_is_tried_on_drawn_ones():
    calls = []

    def bind(spec, device):
        right = plugin.tvr_bind_rms_norm(spec=spec, device=device)

        def run(*args, out):
            calls.append(spec)
            right.run(*args, out=out)
            return out.add_(len(calls) if spec.dtype == "float16" else 0)

        return replace(right, run=run)

    steady, unsteady = (Box(dtypes=[d], devices=["cpu"]) for d in ("float32", "float16"))
    backend = narrow("rms_norm", steady, replace(unsteady, flags=["deterministic"]), bind=bind)
    named = ["rms_norm-5x64-float32"]
    check = next(c for c in CHECKS if c.name == "runs_are_bit_equal")
    subject = Subject(backend, CPU)
    result = judge_drawn(
        subject,
        check,
        "rms_norm",
        Selection(max_examples=10),
        named=[case for case in cases("rms_norm", "smoke") if case.name in named],
        on_begin=lambda handle: None,
    )
    assert result.failed, result


@pytest.mark.parametrize("op", OPS)
def test_drawn_cases_are_declared(op):
    box = Box(
        dtypes=["bfloat16", "float16"],
        devices=["cpu"],
        head_dims=[64, 96],
        block_sizes=[32],
        group_sizes=[3, 4],
        max_rows=4 if op == "linear" else None,
    )
    info = BackendInfo(name="narrow", abi=(1, 0), ops={op: [box]})
    seen = []
    drawing.find_failure(
        strategies.cases(op, info, CPU, "full"), seen.append, seed=0, max_examples=50
    )
    assert len(seen) > 10
    assert not [reasons for case in seen if (reasons := why_not(info, case.spec, CPU))]


def test_drawn_attention_covers_the_geometry_of_the_contract():
    seen = []
    for seed in (0, 1):
        drawing.find_failure(
            strategies.any_cases("attention_prefill", "quick"),
            seen.append,
            seed=seed,
            max_examples=400,
        )
    specs = [case.spec for case in seen]
    assert {s.head_dim for s in specs} == set(strategies.HEAD_DIMS)
    assert {s.block_size for s in specs} == set(strategies.BLOCK_SIZES)
    assert {s.group_size for s in specs} == set(strategies.GROUP_SIZES)
    assert {0, 1} <= {n for case in seen for n in case.kv_lens}
    edges = {n % case.spec.block_size for case in seen for n in case.kv_lens}
    assert {0, 1} <= edges


def test_a_check_without_a_fitting_case_is_skipped_with_the_reason():
    info = plugin.tvr_backend_info()
    plain = [Box(dtypes=["float32"], devices=["cpu"])]
    info = replace(info, ops={"attention_decode": plain})
    backend = SimpleNamespace(
        tvr_backend_info=hookimpl(lambda: info),
        tvr_bind_attention_decode=plugin.tvr_bind_attention_decode,
    )
    results = check_backend(backend, ops=["attention_decode"], checks=["lse_is_natural_log"])
    drawn = next(r for r in results if r.case == "drawn")
    assert (drawn.outcome, drawn.detail) == (
        "skipped",
        "no case can be drawn that is declared and has what the check needs",
    )


def test_no_examples_are_drawn_if_none_are_wanted():
    results = check_backend(plugin, ops=["silu_mul"], max_examples=0)
    assert "drawn" not in {r.case for r in results}


def test_without_hypothesis_one_line_says_what_to_do(monkeypatch):
    for name in ("drawn", "drawing", "strategies"):
        monkeypatch.delattr(f"tvr.conformance.{name}")
        monkeypatch.delitem(sys.modules, f"tvr.conformance.{name}")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(
        ConfigError,
        match=r"pip install 'tvr\[conformance\]', in a clone pip .* or ask for max_examples 0",
    ):
        check_backend(plugin, ops=["silu_mul"])
    results = check_backend(plugin, ops=["silu_mul"], max_examples=0)
    assert not any(r.failed for r in results), format_results(results)


def _cases():
    spec = RmsNormSpec(dtype="float32", hidden_size=8)
    return st.integers(1, 10**9).map(lambda n: Case(spec=spec, num_tokens=n))


def test_shrinking_ends_after_its_time(monkeypatch):
    monkeypatch.setattr(drawing, "SHRINK_SECONDS", 0.2)

    def examine(case):
        time.sleep(0.02)
        if case.num_tokens > 12_345:
            raise ValueError(case.num_tokens)

    began = time.monotonic()
    failure = drawing.find_failure(_cases(), examine, seed=0, max_examples=20)
    assert time.monotonic() - began < 5
    assert failure.case.num_tokens > 12_345
    assert str(failure.error) == str(failure.case.num_tokens)


def test_a_failure_that_comes_and_goes_is_kept():
    calls = []

    def examine(case):
        calls.append(case)
        if len(calls) == 3:
            raise ValueError("once")

    failure = drawing.find_failure(_cases(), examine, seed=0, max_examples=20)
    assert len(calls) >= 3
    assert str(failure.error) == "once"


def test_cases_that_do_not_fit_are_replaced_by_others_for_a_while():
    fitting, asked = [], []

    def is_even(case):
        asked.append(case)
        return case.num_tokens % 2 == 0

    drawing.find_failure(_cases(), fitting.append, fits=is_even, seed=0, max_examples=20)
    assert 15 < len(fitting) <= 20
    fitting.clear()
    asked.clear()
    drawing.find_failure(
        _cases(), fitting.append, fits=lambda case: asked.append(case), seed=0, max_examples=20
    )
    assert not fitting
    assert len(asked) <= 101  # the simplest, and five times twenty


def test_a_device_that_is_lost_ends_the_shrinking():
    calls = []

    def examine(case):
        calls.append(case)
        raise ValueError(case.num_tokens)

    failure = drawing.find_failure(
        _cases(), examine, seed=0, max_examples=20, may_shrink=lambda: False
    )
    assert calls == [failure.case]


def test_an_interrupt_passes_through():
    def examine(case):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawing.find_failure(_cases(), examine, seed=0, max_examples=20)


@pytest.mark.parametrize("op", ["attention_decode", "attention_prefill"])
def test_checks_of_attention_take_the_narrowest_heads(op):
    """Backends may declare any head_dim: no check may count on channels that are not there."""
    text = "dtype=float32 num_heads=2 num_kv_heads=1 head_dim=2 block_size=4 q_lens=1 kv_lens=9"
    results = check_backend(plugin, ops=[op], cases=[f"{text} seed=0"])
    assert sum(result.outcome == "passed" for result in results) > 10
    assert not any(result.failed for result in results), format_results(results)
