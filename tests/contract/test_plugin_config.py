"""plugins.toml: what it may say, and which file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvr.core.plugin_config import PluginConfig, find_config
from tvr.errors import PluginError


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "my.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_the_packaged_order_is_pycuda_triton_torch():
    config = PluginConfig.load()
    assert config.order == ("pycuda", "triton", "torch")
    assert (config.pins, config.disabled, config.options) == ({}, (), {})


def test_a_file_sets_order_pins_disabled_and_options(write):
    path = write(
        'order = ["a", "b"]\ndisabled = ["c"]\n[pins]\nrope = "b"\n[options.a]\nsplits = [1, 2]\n'
    )
    config = PluginConfig.load(path)
    assert config.order == ("a", "b")
    assert config.disabled == ("c",)
    assert config.pins == {"rope": "b"}
    assert config.options == {"a": {"splits": [1, 2]}}
    assert config.source == str(path)


def test_a_key_that_a_file_leaves_out_keeps_its_packaged_value(write):
    config = PluginConfig.load(write('[pins]\nrope = "torch"\n'))
    assert config.order == PluginConfig.load().order


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ordr = []", "key 'ordr' is not known; known: order, pins, disabled, options"),
        ("[pins]\nropee = 'a'", "pins name op 'ropee' is not known; known: rms_norm, .*argmax"),
        ("order = 'a'", "order is 'a'; it must be a list of backend names"),
        ("order = [1]", "order entry is 1; it must be a backend name"),
        ("order = ['a', 'b', 'a']", "order lists a more than once"),
        ("disabled = 3", "disabled is 3; it must be a list"),
        ("pins = []", r"pins is \[\]; it must be a table"),
        ("[pins]\nrope = ['a']", r"pins.rope is \['a'\]; it must be a backend name"),
        ("[options]\na = 1", "options.a is 1; it must be a table"),
        ("disabled = ['a']\n[pins]\nrope = 'a'", "a is both pinned and disabled"),
        ("order = [", "is not valid TOML"),
        ("a = 1\na = 2", "is not valid TOML"),
        (b"order = ['\xff']", "is not valid TOML"),
    ],
)
def test_a_fault_is_one_line_with_the_files_name(write, text, message):
    path = write(text)
    with pytest.raises(PluginError, match=message) as caught:
        PluginConfig.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(PluginError, match="cannot be read: No such file"):
        PluginConfig.load(tmp_path / "none.toml")
    with pytest.raises(PluginError, match="cannot be read: Is a directory"):
        PluginConfig.load(tmp_path)


def test_a_config_made_in_python_is_checked_too():
    with pytest.raises(PluginError, match="'ropee' is not known"):
        PluginConfig(pins={"ropee": "torch"})


def test_the_given_file_goes_before_the_variable_before_the_local_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(None, {}) is None
    Path("plugins.toml").write_text("")
    assert find_config(None, {}) == Path("plugins.toml")
    assert find_config(None, {"TVR_PLUGINS": ""}) == Path("plugins.toml")
    assert find_config(None, {"TVR_PLUGINS": "env.toml"}) == Path("env.toml")
    assert find_config("arg.toml", {"TVR_PLUGINS": "env.toml"}) == Path("arg.toml")


def test_what_backends_are_shown_cannot_be_changed_at_any_depth():
    config = PluginConfig(options={"a": {"deep": {"list": [1]}}})
    shown = config.read_only()
    assert shown["options"]["a"]["deep"]["list"] == (1,)
    with pytest.raises(TypeError, match="does not support item assignment"):
        shown["order"] = ()
    with pytest.raises(TypeError, match="does not support item assignment"):
        shown["options"]["a"]["deep"]["list"] = ()
