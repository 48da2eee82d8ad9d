"""The two doors from pytest: `pytest --pyargs tvr.conformance` and `parametrize_checks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import plugins
from support.fault import Fault, faulty
from support.faults_dense import takes_the_last_of_equals
from tvr.backends.torch_ref import plugin
from tvr.conformance import Expected, parametrize_checks
from tvr.conformance.pytest_door import checks_of_options
from tvr.contract import BackendInfo, BoundOp, Box
from tvr.errors import ConfigError, TvrError
from tvr.hookspecs import hookimpl

TESTS = Path(__file__).parents[1]
TIES = Fault("lowest_id_wins_ties", "argmax", takes_the_last_of_equals)

# Backends of argmax alone: one with a planted fault, one that ends the process on a NaN in 6 rows.
SOURCES = {
    "tvr_wrong.py": """
from dataclasses import replace

from support.fault import Fault, faulty
from support.faults_dense import takes_the_last_of_equals
from tvr.hookspecs import hookimpl

plugin = faulty(Fault("lowest_id_wins_ties", "argmax", takes_the_last_of_equals))
info = plugin.tvr_backend_info()
info = replace(info, name="wrong", ops={"argmax": info.ops["argmax"]})
plugin.tvr_backend_info = hookimpl(lambda: info)
for name in [n for n in vars(plugin) if n.startswith("tvr_bind_") and n != "tvr_bind_argmax"]:
    delattr(plugin, name)
""",
    "tvr_crashing.py": """
import os
from dataclasses import replace

from tvr.backends.torch_ref import plugin
from tvr.hookspecs import hookimpl


@hookimpl
def tvr_backend_info():
    info = plugin.tvr_backend_info()
    return replace(info, name="crashing", ops={"argmax": info.ops["argmax"]})


@hookimpl
def tvr_bind_argmax(spec, device):
    bound = plugin.tvr_bind_argmax(spec=spec, device=device)

    def run(logits, *, out):
        if len(logits) == 6 and spec.dtype == "float32" and logits.isnan().any():
            os.abort()
        return bound.run(logits, out=out)

    return replace(bound, run=run)
""",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return plugins.install(
        tmp_path_factory.mktemp("site"),
        "tvr-planted",
        entry_points={"wrong": "tvr_wrong:plugin", "crashing": "tvr_crashing"},
        sources=SOURCES,
    )


def run_pytest(site, folder, *args):
    """Run pytest in `folder`, as strictly as a user may; return its exit code and what it says."""
    path = os.pathsep.join([str(site), str(TESTS)])
    strict = ["-W", "error", "--strict-markers", "--strict-config", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *strict, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def conformance_run(site, folder, *args):
    # Another package's plugin warns of errors that it sees pass by, in words of its own.
    smoke = ("--tvr-max-examples", "0", "-p", "no:schemathesis", *args)
    return run_pytest(site, folder, "--pyargs", "tvr.conformance", *smoke)


def test_a_wrong_op_fails_with_its_smallest_case_and_others_are_skipped(site, tmp_path):
    code, said = conformance_run(
        site, tmp_path, "--tvr-backend=wrong", "--tvr-op=argmax", "--tvr-op=silu_mul"
    )
    assert code == 1, said
    failed = [line for line in said.splitlines() if line.startswith("FAILED ")]
    assert any("::test_conformance[argmax-lowest_id_wins_ties]" in line for line in failed)
    assert not [line for line in failed if "argmax-" not in line]
    assert "smallest failing case: argmax-1x64-" in said
    assert "dtype=float32 vocab_size=64 num_tokens=1 seed=0" in said
    assert (
        "reproduce: tvr conformance --backend wrong --op argmax --check lowest_id_wins_ties "
        "--case argmax-1x64-"
    ) in said
    assert "PASSED test_conformance.py::test_conformance[argmax-declared_op_is_checked]" in said
    assert "does not implement silu_mul" in said


@pytest.mark.slow  # each crash costs the start of another process
def test_a_backend_that_ends_its_process_fails_alone(site, tmp_path):
    code, said = conformance_run(site, tmp_path, "--tvr-backend=crashing", "--tvr-op=argmax")
    assert code == 1, said
    failed = [line for line in said.splitlines() if line.startswith("FAILED ")]
    assert [line.split("[")[1].split("]")[0] for line in failed] == [
        "argmax-nan_row_stays_alone",
        "argmax-nan_row_gives_minus_one",
    ]
    assert said.count("SIGABRT") >= len(failed)
    assert "smallest failing case: argmax-6x1000-float32" in said
    passed = [line for line in said.splitlines() if line.startswith("PASSED ")]
    assert any("argmax-declared_op_is_checked" in line for line in passed)
    assert len(passed) > 5


def test_without_a_backend_one_line_says_what_to_do(site, tmp_path):
    code, said = conformance_run(site, tmp_path)
    assert code == pytest.ExitCode.INTERRUPTED
    assert said.count("tvr: ") == 1
    assert "name one: pytest --pyargs tvr.conformance --tvr-backend NAME\n" in said
    assert "Traceback" not in said


def test_the_plugin_adds_options_and_imports_nothing():
    code = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import _tvr_pytest\n"
        "print(*set(sys.modules) - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["_tvr_pytest"]


def options(**changed):
    """A pytest config as far as the door reads it."""
    values = {
        "tvr_backend": "torch",
        "tvr_op": ["argmax"],
        "tvr_level": "smoke",
        "tvr_seed": 0,
        "tvr_max_examples": 0,
        "tvr_device": "cpu",
        "tvr_expect": None,
        "tvr_plugins": None,
        "tvr_in_process": True,
    }
    return SimpleNamespace(
        option=SimpleNamespace(**values | changed), add_cleanup=lambda close: None
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tvr_backend": "tortch"}, "backend 'tortch' is not known; known: .*torch"),
        ({"tvr_op": ["argmx"]}, "unknown op 'argmx'; known: rms_norm"),
        ({"tvr_level": "slow"}, "unknown level 'slow'; known: smoke, quick, full"),
        ({"tvr_seed": -1}, "seed is -1"),
        ({"tvr_device": "gpu"}, "device 'gpu' is not known"),
        ({"tvr_expect": "nowhere.toml"}, "nowhere.toml cannot be read"),
        ({"tvr_plugins": "nowhere.toml"}, "nowhere.toml cannot be read"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(changed, message):
    with pytest.raises(TvrError, match=message) as refused:
        checks_of_options(options(**changed))
    assert "\n" not in str(refused.value)


def test_a_file_of_expected_failures_is_strict(tmp_path):
    expect = tmp_path / "expect.toml"
    expect.write_text(
        '[[expected]]\nop = "argmax"\ncheck = "lowest_id_wins_ties"\nreason = "see bug 7"\n'
    )
    tests = {p.id: p.values[0] for p in checks_of_options(options(tvr_expect=str(expect)))}
    tests["argmax-largest_logit_wins"]()
    with pytest.raises(pytest.fail.Exception) as failed:
        tests["argmax-lowest_id_wins_ties"]()
    assert "passed, but is expected to fail (see bug 7); drop the entry" in failed.value.msg
    assert f"--level smoke --expect {expect}" in failed.value.msg


def test_ids_are_op_and_check_and_the_same_every_time():
    first, second = ([p.id for p in checks_of_options(options())] for _ in range(2))
    assert first == second
    assert len(first) == len(set(first))
    assert "argmax-lowest_id_wins_ties" in first
    assert first[-1] == "argmax-declared_op_is_checked"


def checks_of(backend, **selection):
    """The tests that the mark gives, by id."""
    selection = {"max_examples": 0, **selection}
    mark = parametrize_checks(backend, **selection).mark
    assert mark.args[0] == "check"
    return {p.id: p.values[0] for p in mark.args[1]}


def test_every_check_of_an_object_is_a_test_that_passes_or_says_what_is_wrong():
    checks = checks_of(faulty(TIES), ops=["argmax"])
    wrong = checks.pop("argmax-lowest_id_wins_ties")
    # The fault shows in these too: with a NaN, or where rounding makes the largest logits equal.
    for also_wrong in ("largest_logit_wins", "nan_row_gives_minus_one"):
        del checks[f"argmax-{also_wrong}"]
    num_skipped = 0
    for check in checks.values():
        try:
            check()
        except pytest.skip.Exception:  # it would end this test too
            num_skipped += 1
    assert len(checks) - num_skipped > 5
    with pytest.raises(pytest.fail.Exception) as failed:
        wrong()
    assert "smallest failing case: argmax-1x64-" in failed.value.msg
    assert (
        "reproduce: check_backend(<torch>, ops=['argmax'], checks=['lowest_id_wins_ties'], "
        "cases=['argmax-1x64-"
    ) in failed.value.msg


def test_an_installed_backend_is_run_in_a_process_of_its_own_or_in_this_one():
    for in_process in (False, True):
        checks = checks_of(
            "torch", ops=["argmax"], checks=["largest_logit_wins"], in_process=in_process
        )
        assert list(checks) == ["argmax-largest_logit_wins"]
        checks["argmax-largest_logit_wins"]()


def test_a_backend_that_cannot_be_loaded_fails_every_test_with_the_reason():
    checks = checks_of("nowhere", ops=["argmax"], in_process=True)
    for check in checks.values():
        with pytest.raises(pytest.fail.Exception, match="backend 'nowhere' is not known"):
            check()


def test_an_expected_failure_of_the_mark_is_strict():
    known = [Expected(op="argmax", check="lowest_id_wins_ties", reason="see bug 7")]
    selection = {"ops": ["argmax"], "expected_failures": known}
    with pytest.raises(pytest.xfail.Exception, match="see bug 7"):
        checks_of(faulty(TIES), **selection)["argmax-lowest_id_wins_ties"]()
    with pytest.raises(pytest.fail.Exception, match="drop the entry"):
        checks_of(plugin, **selection)["argmax-lowest_id_wins_ties"]()


def test_a_declared_op_of_which_nothing_is_run_fails():
    """Its box is of another device, so each check is skipped: nothing says that it works."""
    box = Box(dtypes=["float32"], devices=["cuda"])
    backend = SimpleNamespace(
        tvr_backend_info=hookimpl(lambda: BackendInfo(name="far", abi=(1, 0), ops={"rope": [box]})),
        tvr_bind_rope=hookimpl(lambda spec, device: None),
    )
    checks = checks_of(backend, ops=["rope", "argmax"])
    with pytest.raises(pytest.fail.Exception, match="rope is declared, but no check was run"):
        checks["rope-declared_op_is_checked"]()
    with pytest.raises(pytest.skip.Exception, match="device cpu is not among cuda"):
        checks["rope-pairs_are_half_split"]()
    with pytest.raises(pytest.skip.Exception, match="does not implement argmax"):
        checks["argmax-declared_op_is_checked"]()


def test_a_declared_op_is_known_to_be_checked_whatever_was_run_before():
    calls = []

    def bind(spec, device):
        right = plugin.tvr_bind_argmax(spec=spec, device=device)

        def run(logits, *, out):
            calls.append(len(logits))
            return right.run(logits, out=out)

        return BoundOp(run=run)

    hooks = {name: value for name, value in vars(plugin).items() if name.startswith("tvr_")}
    checks = checks_of(
        SimpleNamespace(**hooks | {"tvr_bind_argmax": hookimpl(bind)}), ops=["argmax"]
    )
    checks["argmax-declared_op_is_checked"]()
    assert calls
    num_calls = len(calls)
    checks["argmax-declared_op_is_checked"]()
    checks["argmax-outputs_are_returned"]()
    assert len(calls) == num_calls, "a check is run once, whoever asks for its results"


def test_an_unknown_name_is_refused_when_the_mark_is_made():
    with pytest.raises(ConfigError, match="unknown op 'argmx'"):
        parametrize_checks("torch", ops=["argmx"])
