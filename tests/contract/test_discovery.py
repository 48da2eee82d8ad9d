"""Finding backends among installed distributions, and keeping a broken one to itself."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.fakes import fake, manager_of
from support.plugins import install, install_sample
from tvr.core.plugins import PluginConfig
from tvr.errors import AbiMismatch, BackendUnavailable, ConfigError, PluginError, PluginLoadError

ROOT = Path(__file__).parents[2]

GOOD = """
from tvr.contract import BackendInfo, BoundOp, Box
from tvr.hookspecs import hookimpl

@hookimpl
def tvr_backend_info():
    box = Box(dtypes=["float32"], devices=["cpu"])
    return BackendInfo(name="{name}", abi=(1, 0), ops={{"rope": [box]}})

@hookimpl
def tvr_bind_rope(spec, device):
    return BoundOp(run=lambda q, k, positions, cos_sin_cache, *, q_out, k_out: (q_out, k_out))
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on `sys.path`; modules imported from it are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def install_good(site, package, backend, **kwargs):
    sources = {f"{package}.py": GOOD.format(name=backend)}
    return install(site, package, entry_points={backend: package}, sources=sources, **kwargs)


def config_of(*order: str, **kwargs) -> PluginConfig:
    return PluginConfig(order=order, **kwargs)


def test_an_installed_backend_is_found_by_its_entry_point(site):
    install_good(site, "good", "fast", version="2.5")
    manager = manager_of(config=config_of("fast"), site=site)
    (backend,) = manager.backends
    assert (backend.name, backend.distribution, backend.version) == ("fast", "good", "2.5")


INTERRUPTED_WHEN_TOLD = (
    GOOD.format(name="fast")
    + """
@hookimpl
def tvr_configured(config):
    raise KeyboardInterrupt
"""
)

REFUSES_OPTIONS = (
    GOOD.format(name="fast")
    + """
from tvr.errors import ConfigError

@hookimpl
def tvr_configured(config):
    raise ConfigError("[options.fast] has treads; allowed: threads")
"""
)

AS_CLASS = (
    "from tvr.contract import BackendInfo, BoundOp, Box\n"
    "from tvr.hookspecs import hookimpl\n"
    "class Backend:\n"
    "    @hookimpl\n"
    "    def tvr_backend_info(self):\n"
    "        box = Box(dtypes=['float32'], devices=['cpu'])\n"
    "        return BackendInfo(name='fast', abi=(1, 0), ops={'argmax': [box]})\n"
    "    @hookimpl\n"
    "    def tvr_bind_argmax(self, spec, device):\n"
    "        return BoundOp(run=self.run)\n"
    "    def run(self, logits, *, out): ...\n"
    "instance = Backend()\n"
)


def test_options_that_a_backend_refuses_are_the_users_error(site):
    """Another backend would serve instead, and nobody would see the misspelt word."""
    sources = {"mod.py": REFUSES_OPTIONS}
    install(site, "dist", entry_points={"fast": "mod"}, sources=sources)
    with pytest.raises(ConfigError, match=r"\[options.fast\] has treads; allowed: threads"):
        manager_of(config=config_of("torch"), site=site)
    assert "fast" in manager_of(config=config_of("torch", disabled=("fast",)), site=site).known


@pytest.mark.parametrize("value", ["mod:Backend", "mod:instance"])
def test_an_entry_point_may_be_a_class_or_an_instance(site, value):
    """pluggy would register the class and call its methods without self, at the first token."""
    install(site, "dist", entry_points={"fast": value}, sources={"mod.py": AS_CLASS})
    manager = manager_of(config=config_of("fast"), site=site)
    assert manager.known["fast"].reasons == []
    assert [b.name for b in manager.backends] == ["fast"]


def test_a_class_that_needs_arguments_is_refused_in_words(site):
    source = "class Backend:\n    def __init__(self, device): ...\n"
    install(site, "dist", entry_points={"fast": "mod:Backend"}, sources={"mod.py": source})
    (reason,) = manager_of(config=config_of("fast"), site=site).known["fast"].reasons
    assert "class Backend, which cannot be made without arguments" in reason
    assert "instance or a module" in reason


BROKEN = {
    "import error": ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
    "syntax error": ("def (", "SyntaxError"),
    "system exit": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "exception": ("1 / 0", "ZeroDivisionError: division by zero"),
    "no hooks": ("", "does not implement tvr_backend_info; its hooks: none"),
    "multi-line text": ("raise OSError('first\\n   second')", "OSError: first second"),
}


@pytest.mark.parametrize(("source", "text"), BROKEN.values(), ids=BROKEN)
def test_one_broken_plugin_leaves_the_others_and_keeps_its_error(site, source, text):
    install(site, "a_bad", entry_points={"bad": "bad_mod"}, sources={"bad_mod.py": source})
    install_good(site, "good", "fast")
    manager = manager_of(config=config_of("bad", "fast"), site=site)
    assert [b.name for b in manager.backends] == ["fast"]
    bad = manager.known["bad"]
    assert bad.status == "failed"
    assert text in bad.reasons[0]
    assert bad.error is not None
    with pytest.raises(BackendUnavailable, match="backend 'bad' cannot be used: failed") as caught:
        manager.require("bad")
    assert caught.value.__cause__ is bad.error
    assert "\n" not in str(caught.value)


def test_an_attribute_that_is_missing_is_kept_as_the_reason(site):
    install(site, "bad", entry_points={"bad": "bad_mod:nothing"}, sources={"bad_mod.py": ""})
    manager = manager_of(config=config_of("bad"), site=site)
    assert "has no attribute 'nothing'" in manager.known["bad"].reasons[0]


def test_a_distribution_seen_through_a_link_loads_once(site, monkeypatch):
    """lib64 -> lib in a virtual environment, both on sys.path."""
    lib = site / "lib"
    install_good(lib, "good", "fast")
    lib64 = site / "lib64"
    lib64.symlink_to(lib, target_is_directory=True)
    monkeypatch.syspath_prepend(str(lib))
    monkeypatch.syspath_prepend(str(lib64))
    manager = manager_of(config=config_of("fast"), site=[lib64, lib])
    assert manager.known["fast"].status == "ok"
    assert len(manager.backends) == 1


def test_an_older_copy_further_down_the_path_is_shadowed_as_its_modules_are(site):
    install_good(site / "first", "some.good", "fast", version="2.0")
    install_good(site / "second", "some-good", "fast", version="1.0")
    sys.path[:0] = [str(site / "first")]
    manager = manager_of(config=config_of("fast"), site=[site / "first", site / "second"])
    assert manager.known["fast"].version == "2.0"


def test_a_first_copy_without_backends_shadows_an_older_one_with_them(site):
    """Its modules are those of the first copy, in which the backend is gone."""
    install(site / "first", "good", entry_points={}, version="2.0")
    install_good(site / "second", "good", "fast", version="1.0")
    manager = manager_of(site=[site / "first", site / "second"])
    assert "fast" not in manager.known


def test_a_damaged_distribution_without_backends_is_not_worth_a_note(site):
    info = site / "stray-1.0.dist-info"
    info.mkdir()
    install_good(site, "good", "fast")
    manager = manager_of(config=config_of("fast"), site=site)
    assert [b.name for b in manager.backends] == ["fast"]
    assert manager.notes == []


@pytest.mark.parametrize("source", ["raise KeyboardInterrupt", INTERRUPTED_WHEN_TOLD])
def test_an_interrupt_while_a_plugin_loads_is_not_taken_for_a_broken_plugin(site, source):
    install(site, "dist", entry_points={"fast": "mod"}, sources={"mod.py": source})
    with pytest.raises(KeyboardInterrupt):
        manager_of(config=config_of("fast"), site=site)


def test_two_plugins_of_one_name_are_an_error_that_names_both(site):
    """Neither wins: which one ran would depend on the order of sys.path."""
    install_good(site, "first_dist", "fast")
    install_good(site, "second_dist", "fast", version="3.1")
    install_good(site, "third_dist", "other")
    manager = manager_of(config=config_of("fast", "other"), site=site)
    assert [b.name for b in manager.backends] == ["other"]
    (reason,) = manager.known["fast"].reasons
    assert "two plugins are named 'fast'" in reason
    assert "first_dist 1.0 (first_dist)" in reason
    assert "second_dist 3.1 (second_dist)" in reason
    with pytest.raises(BackendUnavailable, match=r"first_dist.*second_dist"):
        manager.require("fast")


def test_a_given_object_of_an_installed_name_is_an_error(site):
    install_good(site, "good", "fast")
    with pytest.raises(PluginLoadError, match="two plugins are named 'fast': good and this one"):
        manager_of(fake("fast"), config=config_of("fast"), site=site)


def test_the_given_object_may_be_the_installed_one(site):
    install_good(site, "good", "fast")
    install_good(site, "better", "faster")
    good = importlib.import_module("good")
    manager = manager_of(good, config=config_of("faster", "fast"), site=site)
    assert [b.name for b in manager.backends] == ["fast", "faster"]


def test_the_entry_point_and_the_info_must_agree_on_the_name(site):
    sources = {"mod.py": GOOD.format(name="slow")}
    install(site, "dist", entry_points={"fast": "mod"}, sources=sources)
    manager = manager_of(config=config_of("fast"), site=site)
    assert "says 'slow', the entry point 'fast'" in manager.known["fast"].reasons[0]


@pytest.mark.parametrize("major", [0, 2, 11])
def test_a_plugin_of_another_abi_major_is_seen_without_being_imported(site, major):
    install(
        site,
        "old",
        entry_points={"old": "old_mod"},
        sources={"old_mod.py": "raise AssertionError('imported')"},
        group=f"tvr.backends.v{major}",
    )
    manager = manager_of(config=config_of("old"), site=site)
    assert "old_mod" not in sys.modules
    old = manager.known["old"]
    assert isinstance(old.error, AbiMismatch)
    assert f"old 1.0 (old_mod) is written for ABI {major}" in old.reasons[0]
    with pytest.raises(BackendUnavailable, match=f"written for ABI {major}"):
        manager.require("old")


def test_a_package_may_ship_an_entry_point_for_each_major(site):
    install_good(site, "good", "fast")
    install(site, "good", entry_points={"fast": "later"}, group="tvr.backends.v2")
    manager = manager_of(config=config_of("fast"), site=site)
    assert [b.name for b in manager.backends] == ["fast"]
    assert "written for ABI 2" in manager.known["fast"].notes[0]


def test_a_right_group_with_a_wrong_major_inside_is_a_mismatch(site):
    source = GOOD.format(name="fast").replace("(1, 0)", "(2, 0)")
    install(site, "dist", entry_points={"fast": "mod"}, sources={"mod.py": source})
    backend = manager_of(config=config_of("fast"), site=site).known["fast"]
    assert isinstance(backend.error, AbiMismatch)
    assert "declares ABI 2.0; this tvr has 1.0" in backend.reasons[0]


def test_a_group_that_only_looks_alike_is_not_ours(site):
    install(site, "x", entry_points={"x": "x_mod"}, group="tvr.backends.v1.extra")
    install(site, "y", entry_points={"y": "y_mod"}, group="my.tvr.backends.v1")
    assert not {"x", "y"} & set(manager_of(site=site).known)


def test_damaged_metadata_is_noted_and_passed_over(site):
    install(site, "bad", entry_points={"bad": "bad_mod"})
    (site / "bad-1.0.dist-info" / "entry_points.txt").write_bytes(b"[tvr.backends.v1]\n\xff = x\n")
    install_good(site, "good", "fast")
    manager = manager_of(config=config_of("fast"), site=site)
    assert [b.name for b in manager.backends] == ["fast"]
    assert "unreadable metadata" in manager.notes[0]


def test_a_disabled_plugin_is_not_even_imported(site):
    source = "raise AssertionError('imported')"
    install(site, "dist", entry_points={"fast": "mod"}, sources={"mod.py": source})
    manager = manager_of(config=config_of("fast", disabled=("fast",)), site=site)
    assert manager.known["fast"].status == "disabled"
    assert "mod" not in sys.modules
    with pytest.raises(BackendUnavailable, match="is disabled in"):
        manager.require("fast")


def test_strict_is_content_with_broken_plugins_that_are_disabled(site):
    install(site, "dist", entry_points={"bad": "mod"}, sources={"mod.py": "1 / 0"})
    install(site, "old", entry_points={"old": "old_mod"}, group="tvr.backends.v0")
    with pytest.raises(
        PluginError, match=r"refuses 2 broken plugin.*bad \(dist 1.0\).*old \(old 1.0\)"
    ):
        manager_of(site=site).refuse_broken()
    manager_of(config=config_of(disabled=("bad", "old")), site=site).refuse_broken()


def test_strict_is_content_with_a_plugin_that_cannot_run_here(site):
    source = GOOD.format(name="fast") + "@hookimpl\ndef tvr_probe(device): return ['no driver']\n"
    install(site, "dist", entry_points={"fast": "mod"}, sources={"mod.py": source})
    manager = manager_of(config=config_of("fast"), site=site)
    assert manager.known["fast"].status == "unavailable"
    manager.refuse_broken()


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (config_of("fsat"), "order"),
        (config_of(pins={"rope": "fsat"}), "pins"),
        (config_of(disabled=("fsat",)), "disabled"),
        (config_of(options={"fsat": {}}), "options"),
    ],
)
def test_a_name_that_nobody_has_is_an_error_listing_the_known_ones(site, config, key):
    install_good(site, "good", "fast")
    message = f"{key} names backend 'fsat', which is not known; known: fast, pycuda, torch, triton"
    with pytest.raises(PluginError, match=message):
        manager_of(config=config, site=site)


def test_a_built_in_name_that_is_not_installed_is_passed_over(site):
    install_good(site, "good", "fast")
    manager = manager_of(config=config_of("triton", "fast"), site=site)
    assert [b.name for b in manager.backends] == ["fast"]
    assert manager.known["triton"].status == "not installed"
    with pytest.raises(BackendUnavailable, match="'triton' cannot be used: is not installed"):
        manager.require("triton")


@pytest.mark.parametrize("name", ["only_rope", "only_rms_norm"])
def test_a_fresh_process_finds_an_installed_package_and_the_built_in_reference(tmp_path, name):
    """As a user has it: real metadata on PYTHONPATH, everything else as installed."""
    install_sample(tmp_path, f"tvr_{name}")
    install(
        tmp_path,
        "tvr-as-installed",
        entry_points={"torch": "tvr.backends.torch_ref.plugin"},
    )
    code = (
        "from tvr.contract import DeviceFacts\n"
        "from tvr.core.plugins import BackendManager, PluginConfig\n"
        f"config = PluginConfig(order=('{name}', 'torch'))\n"
        "from importlib.metadata import distributions\n"
        f"installed = distributions(path=[{str(tmp_path)!r}])\n"
        "m = BackendManager(config, device=DeviceFacts(type='cpu'), installed=installed)\n"
        "print([b.name for b in m.backends], [b.distribution for b in m.backends])\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    package = f"tvr-{name.replace('_', '-')}"
    assert done.stdout == f"['{name}', 'torch'] ['{package}', 'tvr-as-installed']\n"
