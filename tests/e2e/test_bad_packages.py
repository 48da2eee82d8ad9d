"""Every kind of bad package, all installed at once: each is named with its reason, none hurts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from support.plugins import install

HEAD = """
from tvr.contract import BackendInfo, BoundOp, Box
from tvr.hookspecs import hookimpl
box = Box(dtypes=["float32"], devices=["cpu"])
"""
INFO = """
@hookimpl
def tvr_backend_info():
    return BackendInfo(name={name!r}, abi=(1, 0), ops={{"rope": [box]}})
"""
BIND = """
@hookimpl
def tvr_bind_rope(spec, device):
    return None
"""
GOOD = HEAD + INFO + BIND
AS_CLASS = HEAD + "class Backend:\n" + (INFO + BIND).replace("\n", "\n    ")


class Bad(NamedTuple):
    source: str  # of the module, in which {name} is the backend's
    reason: str  # what `tvr backends` must say
    value: str = "{module}"  # of the entry point


BAD = {
    # At import.
    "import_error": Bad("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
    "syntax_error": Bad("def (", "SyntaxError"),
    "exits": Bad("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    "exits_well": Bad("raise SystemExit(0)", "SystemExit: 0"),
    "skips": Bad("class Skip(BaseException): ...\nraise Skip('no GPU')", "Skip: no GPU"),
    # What the entry point names.
    "no_such_attribute": Bad(GOOD, "has no attribute 'nothing'", "{module}:nothing"),
    "malformed": Bad(GOOD, "the entry point names 'no module'; it must be", "no module"),
    "other_name": Bad(GOOD.replace("{name!r}", "'another'"), "says 'another', the entry point"),
    "function": Bad("def make(): ...", "does not implement tvr_backend_info", "{module}:make"),
    # A class: tvr makes an instance of it, so it must be possible to make one.
    "class_with_arguments": Bad(
        "class Backend:\n    def __init__(self, device): ...",
        "the class Backend, which cannot be made without arguments",
        "{module}:Backend",
    ),
    "class_that_raises": Bad(
        "class Backend:\n    def __init__(self): raise OSError('no driver')",
        "the class Backend, and making an instance of it raised OSError: no driver",
        "{module}:Backend",
    ),
    "class_without_self": Bad(
        AS_CLASS, "tvr_backend_info is a method that does not take self", "{module}:Backend"
    ),
    # Hooks.
    "wrong_signature": Bad(
        GOOD.replace("spec, device", "spec"),
        "tvr_bind_rope does not take device; declare tvr_bind_rope(spec, device)",
    ),
    "default_argument": Bad(
        GOOD.replace("spec, device", "spec, device=None"), "tvr_bind_rope: device has a default"
    ),
    "misspelt": Bad(GOOD.replace("bind_rope", "bnid_rope"), "hook tvr_bnid_rope is not known"),
    "unmarked": Bad(GOOD + "def tvr_probe(device): ...", "tvr_probe is not marked"),
    "wrapper": Bad(
        HEAD + INFO + BIND.replace("hookimpl", "hookimpl(wrapper=True)").replace("return", "yield"),
        "tvr_bind_rope is a hook wrapper",
    ),
    "configured_raises": Bad(
        GOOD + "@hookimpl\ndef tvr_configured(config): raise KeyError('threads')",
        "KeyError: 'threads'",
    ),
    # What it declares.
    "other_major": Bad(GOOD.replace("(1, 0)", "(2, 0)"), "declares ABI 2.0; this tvr has 1.0"),
    "info_is_a_dict": Bad(
        HEAD + "@hookimpl\ndef tvr_backend_info(): return {{}}",
        "tvr_backend_info returned dict; it must return a BackendInfo",
    ),
    "unknown_op": Bad(GOOD.replace('"rope"', '"ropes"'), "op ropes is not known to ABI 1.0"),
    "unbound_op": Bad(HEAD + INFO, "declares op rope but does not implement tvr_bind_rope"),
    "bad_box": Bad(
        GOOD.replace('devices=["cpu"]', 'devices=["cpu"], head_dims=64'),
        "rope: head_dims of a Box is 64; it must be a list of values",
    ),
}


def module_of(name: str) -> str:
    return f"{name}_module"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with all of `BAD`, those that no module can show, and two good packages."""
    site = tmp_path_factory.mktemp("site").resolve()

    def add(name, source, value="{module}", package=None, **kwargs):
        module = module_of(package or name)
        return install(
            site,
            package or f"package-{name}",
            entry_points={name: value.format(module=module)},
            sources={f"{module}.py": source.format(name=name) if "{" in source else source},
            **kwargs,
        )

    for name, bad in BAD.items():
        add(name, bad.source, bad.value)
    add("older_abi", "raise AssertionError('imported')", group="tvr.backends.v0")
    add("twin", GOOD, package="twin-a")
    add("twin", GOOD, package="twin-b")
    add("torch", GOOD, package="impostor")
    add("unreadable", GOOD)
    metadata = site / "package_unreadable-1.0.dist-info" / "METADATA"
    metadata.write_bytes(b"Name: caf\xe9\n")
    add("talkative", "print('hello from the plugin')\n" + GOOD)
    add(
        "as_class",
        AS_CLASS.replace("()", "(self)").replace("(spec", "(self, spec"),
        "{module}:Backend",
    )
    return site


def tvr(site, *args):
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "tvr", *args],
        env={**os.environ, "PYTHONPATH": path},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def listed(site):
    done = tvr(site, "backends", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", BAD)
def test_a_bad_package_is_listed_with_its_reason(listed, name):
    assert f"\n{name} " in listed.stdout
    (line,) = (line for line in listed.stdout.splitlines() if line.startswith(f"{name}: "))
    assert BAD[name].reason in line


def test_what_was_never_imported_is_listed_with_its_reason(listed, site):
    for line in (
        "older_abi: package-older_abi 1.0 (older_abi_module) is written for ABI 0;",
        "twin: failed to load: two plugins are named 'twin': twin-a 1.0 (twin-a_module) and twin-b",
        "note: impostor 1.0 (impostor_module) is not loaded: 'torch' is a backend of tvr itself;",
        f"note: {site}/package_unreadable-1.0.dist-info: unreadable metadata: UnicodeDecodeError",
    ):
        assert f"\n{line}" in listed.stdout


def test_what_a_plugin_prints_stays_out_of_stdout(listed, site):
    assert "hello from the plugin" not in listed.stdout
    assert "hello from the plugin" in listed.stderr
    done = tvr(site, "backends", "--device", "cpu", "--json")
    rows = {row["name"]: row["status"] for row in json.loads(done.stdout)["backends"]}
    assert rows["talkative"] == "not listed"
    assert rows["as_class"] == "not listed"
    assert rows["torch"] == "ok"
    assert {rows[name] for name in BAD} == {"failed"}


def test_the_rest_works(site):
    done = tvr(site, "run", "ROMEO:", "--max-tokens", "4", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "hello" not in done.stdout


def test_a_good_package_beside_the_bad_ones_is_used_when_named(site):
    done = tvr(
        site, "run", "ROMEO:", "--max-tokens", "4", "--device", "cpu", "--backend", "as_class"
    )
    assert done.returncode == 0, done.stderr
    assert "as_class does not serve" in done.stderr


@pytest.mark.parametrize("command", [["backends"], ["run", "ROMEO:", "--max-tokens", "4"]])
def test_strict_refuses_to_start_in_one_line_that_names_each(site, command):
    done = tvr(site, *command, "--device", "cpu", "--strict")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = (x for x in done.stderr.splitlines() if x.startswith("tvr: error: "))
    # Those listed as failed, the impostor and the unreadable one.
    assert f"strict refuses {len(BAD) + 4} broken plugin(s): " in line
    for name in [*BAD, "older_abi", "twin", "impostor", "package_unreadable"]:
        assert name in line
    for bad in BAD.values():
        assert bad.reason in line
    assert "list it under `disabled`" in line
