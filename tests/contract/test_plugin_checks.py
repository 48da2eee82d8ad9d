"""What makes a plugin be refused when it is loaded, rather than go wrong at the first token."""

from __future__ import annotations

import pytest
from pluggy import PluginManager

from support.fakes import BOX, CPU, fake, manager_of
from support.specs import spec_of
from tvr import hookspecs
from tvr.contract import OPS, BackendInfo, Box
from tvr.core.plugin_checks import HOOKS
from tvr.errors import AbiMismatch, PluginLoadError
from tvr.hookspecs import hookimpl


def marked(function, **options):
    return hookimpl(**options)(function)


def refuse(plugin, message: str, error=PluginLoadError) -> None:
    with pytest.raises(error, match=message) as caught:
        manager_of(plugin)
    assert "\n" not in str(caught.value)


def test_there_is_a_bind_hook_for_every_op_and_no_other():
    assert {name for name in HOOKS if name.startswith("tvr_bind_")} == {
        f"tvr_bind_{op}" for op in OPS
    }


# Names and hooks that pluggy never checks.


def test_a_misspelt_hook_is_refused():
    plugin = fake("fast", ["rope"], tvr_bind_attnetion_decode=marked(lambda spec, device: None))
    refuse(plugin, "hook tvr_bind_attnetion_decode is not known to ABI 1.0")


def test_a_misspelt_hook_of_any_name_is_refused():
    refuse(fake("fast", attnetion=marked(lambda: None)), "hook attnetion is not known")


def test_a_misspelt_probe_is_refused():
    refuse(fake("fast", tvr_prove=marked(lambda device: [])), "hook tvr_prove is not known")


def test_an_unmarked_hook_is_refused():
    """Without the decorator pluggy does not see it, and the backend would seem to have no probe."""
    refuse(fake("fast", tvr_probe=lambda device: []), "tvr_probe is not marked with @tvr.hookimpl")
    refuse(fake("fast", tvr_bind_ropee=lambda spec, device: None), "tvr_bind_ropee is not marked")


def test_a_hook_implemented_under_another_name_counts():
    plugin = fake("fast", ["rope"], bind=None)
    del plugin.tvr_bind_rope
    plugin.my_rope = marked(lambda spec, device: None, specname="tvr_bind_rope")
    assert "tvr_bind_rope" in manager_of(plugin).known["fast"].plugin.hooks


def test_a_hook_implemented_twice_is_refused():
    plugin = fake("fast", my_probe=marked(lambda device: [], specname="tvr_probe"))
    plugin.tvr_probe = marked(lambda device: [])
    refuse(plugin, "implements tvr_probe twice")


@pytest.mark.parametrize("plugin", [object(), 7, len, "torch"])
def test_an_object_without_hooks_is_refused(plugin):
    refuse(plugin, "does not implement tvr_backend_info; its hooks: none")


def test_a_misspelt_info_hook_is_named():
    class Plugin:
        @hookimpl
        def tvr_backend_inf(self): ...

    refuse(Plugin(), "does not implement tvr_backend_info; its hooks: tvr_backend_inf")


# Signatures.


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda spec: None, r"tvr_bind_rope does not take device; declare tvr_bind_rope\(spec, d"),
        (lambda device: None, "does not take spec"),
        (lambda: None, "does not take spec, device"),
        (lambda spec, device=None: None, "device has a default; declare"),
        (lambda spec, device, extra=None: None, "extra has a default; declare"),
        (lambda spec, dev: None, "dev is not an argument of it"),
        (lambda spec, *, device: None, "device is not an argument of it"),
        (lambda *args: None, r"\*args is not an argument of it"),
        (lambda **kwargs: None, r"\*\*kwargs is not an argument of it"),
    ],
)
def test_a_bind_hook_of_another_signature_is_refused(function, message):
    """pluggy calls one with too few arguments, and 1.6 never gives one that has a default."""
    refuse(fake("fast", ["rope"], tvr_bind_rope=marked(function)), message)


def test_a_method_that_forgets_self_is_refused():
    class Plugin:
        @hookimpl
        def tvr_backend_info(self):
            return BackendInfo(name="fast", abi=(1, 0), ops={"rope": [BOX]})

        @hookimpl
        def tvr_bind_rope(spec, device):
            raise AssertionError("called")

    refuse(Plugin(), "tvr_bind_rope does not take spec")


@pytest.mark.parametrize("hook", ["tvr_probe", "tvr_stream", "tvr_configured"])
def test_no_hook_may_have_an_argument_with_a_default(hook):
    refuse(fake("fast", **{hook: marked(lambda device=None: None)}), "device has a default")


def test_another_hook_may_take_fewer_arguments():
    """So that a minor version can add one."""
    plugin = fake("fast", tvr_probe=marked(lambda: ["no licence"]))
    assert manager_of(plugin).known["fast"].reasons == ["no licence"]


@pytest.mark.parametrize("option", ["hookwrapper", "wrapper"])
def test_a_hook_wrapper_is_refused(option):
    def wrap(spec, device):
        yield

    plugin = fake("fast", ["rope"], tvr_bind_rope=marked(wrap, **{option: True}))
    refuse(plugin, "tvr_bind_rope is a hook wrapper")


def test_the_order_of_a_bind_hooks_arguments_is_free():
    seen = []
    plugin = fake("fast", ["rope"], tvr_bind_rope=marked(lambda device, spec: seen.append(spec)))
    backend = manager_of(plugin).known["fast"]
    backend.call("tvr_bind_rope", spec=spec_of("rope"), device=CPU)
    assert seen == [spec_of("rope")]


# What it declares.


@pytest.mark.parametrize("value", [None, {"name": "fast"}, "fast"])
def test_an_info_of_another_type_is_refused(value):
    plugin = fake("fast", tvr_backend_info=marked(lambda: value))
    refuse(plugin, f"returned {type(value).__name__}; it must return a BackendInfo")


def test_an_info_that_raises_is_refused_with_its_text():
    def info():
        raise RuntimeError("touched the device")

    plugin = fake("fast", tvr_backend_info=marked(info))
    refuse(plugin, "tvr_backend_info raised RuntimeError: touched the device")


def test_a_slip_in_a_box_is_refused_with_its_text():
    plugin = fake("fast", tvr_backend_info=marked(lambda: Box(dtypes=["half"])))
    refuse(plugin, r"tvr_backend_info raised Box dtypes \['half'\] not known")


def test_an_op_declared_but_not_implemented_is_refused():
    plugin = fake("fast", ["rope", "argmax"])
    del plugin.tvr_bind_argmax
    refuse(plugin, "declares op argmax but does not implement tvr_bind_argmax")


def test_an_op_implemented_but_not_declared_is_refused():
    plugin = fake("fast", ["rope"], tvr_bind_argmax=marked(lambda spec, device: None))
    refuse(plugin, "implements tvr_bind_argmax but tvr_backend_info declares no op argmax")


def test_another_abi_major_is_a_mismatch():
    refuse(fake("fast", abi=(2, 0)), r"declares ABI 2.0; this tvr has 1.0", AbiMismatch)


def with_unknown(what: str, abi: tuple[int, int]):
    plugin = fake("fast", ["rope"], abi=abi)
    if what == "hook":
        plugin.tvr_bind_merge_states = marked(lambda spec, device: None)
    else:
        ops = {"op": {"rope": [BOX], "merge_states": [BOX]}}.get(what)
        if what == "field":
            box = Box(dtypes=["float32"], fields=frozenset({"sinks"}))
            ops = {"rope": [box]}
        info = BackendInfo(name="fast", abi=abi, ops=ops)
        plugin.tvr_backend_info = marked(lambda: info)
    return plugin


UNKNOWN = {
    "hook": "hook tvr_bind_merge_states",
    "op": "op merge_states",
    "field": "rope field sinks",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_the_plugins_own_minor_does_not_have_is_refused(what):
    refuse(with_unknown(what, (1, 0)), f"{UNKNOWN[what]} is not known to ABI 1.0")


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_a_newer_minor_may_have_is_left_aside_with_a_note(what):
    manager = manager_of(with_unknown(what, (1, 1)))
    (backend,) = manager.backends
    assert backend.notes == [f"{UNKNOWN[what]} is newer than ABI 1.0 and is left aside"]
    assert manager.explain()["backends"][0]["ops"] == ["rope"]


def test_a_newer_minor_does_not_excuse_a_missing_bind_hook():
    plugin = fake("fast", ["rope", "argmax"], abi=(1, 1))
    del plugin.tvr_bind_argmax
    refuse(plugin, "does not implement tvr_bind_argmax")


def test_an_optional_hook_is_left_aside_with_a_note():
    """pluggy's own way to implement a hook that only a later host has."""
    plugin = fake("fast", tvr_later=marked(lambda: None, optionalhook=True))
    (backend,) = manager_of(plugin).backends
    assert "hook tvr_later" in backend.notes[0]


# After a failed registration.


def test_a_failed_registration_leaves_no_hook_of_the_plugin_behind(monkeypatch):
    """pluggy 1.6 keeps the hooks it came to before the fault."""
    managers = []
    monkeypatch.setattr(
        "tvr.core.plugins.PluginManager",
        lambda project: managers.append(PluginManager(project)) or managers[-1],
    )

    def fail(config):
        raise RuntimeError("bad option")

    plugin = fake("fast", tvr_configured=marked(fail), probe=lambda device: [])
    refuse(plugin, "RuntimeError: bad option")
    (pm,) = managers
    assert pm.get_plugins() == set()
    for name in HOOKS:
        assert getattr(pm.hook, name).get_hookimpls() == []


def test_the_engines_own_plugin_manager_has_the_hookspecs_of_the_contract():
    manager = manager_of(fake("fast"))
    for name in HOOKS:
        assert getattr(manager._pm.hook, name).has_spec()
    assert manager._pm.project_name == hookspecs.PROJECT
