"""Rank, probe and configuration of the backends of one engine."""

from __future__ import annotations

import json

import pytest

from support.fakes import BOX, CPU, GPU, fake, manager_of, table_of
from support.plugins import install
from support.specs import spec_of
from tvr.contract import Box
from tvr.core.ops import OpTable
from tvr.core.plugins import PluginConfig
from tvr.errors import BackendUnavailable, ConfigError, PluginLoadError
from tvr.hookspecs import hookimpl


def names(backends) -> list[str]:
    return [b.name for b in backends]


def raising(error):
    def raise_it(device):
        raise error

    return raise_it


def test_given_plugins_rank_in_the_order_given_before_the_configured_order():
    a, b, c = fake("a"), fake("b"), fake("c")
    manager = manager_of(b, a, c, config=PluginConfig(order=("c", "torch")))
    assert names(manager.backends) == ["b", "a", "c"]


def test_a_backend_named_first_is_ranked_before_all():
    manager = manager_of(fake("a"), fake("b"))
    assert names(manager.ranked("b")) == ["b", "a"]


def test_one_plugin_given_twice_counts_once():
    plugin = fake("a")
    assert names(manager_of(plugin, plugin).backends) == ["a"]


def test_two_given_plugins_of_one_name_are_an_error():
    with pytest.raises(PluginLoadError, match="two plugins are named 'a'"):
        manager_of(fake("a"), fake("a"))


def test_a_given_plugin_may_be_a_class():
    class Plugin:
        @hookimpl
        def tvr_backend_info(self):
            return fake("a", ["rope"]).tvr_backend_info()

        @hookimpl
        def tvr_bind_rope(self, spec, device):
            return None

    assert names(manager_of(Plugin).backends) == ["a"]


def test_a_given_plugin_that_is_disabled_is_an_error():
    config = PluginConfig(disabled=("a",))
    with pytest.raises(PluginLoadError, match="'a' is disabled in"):
        manager_of(fake("a"), config=config)


def test_each_manager_has_plugins_of_its_own():
    plugin = fake("a")
    first, second = manager_of(plugin), manager_of(plugin)
    assert first._pm is not second._pm
    assert names(manager_of().backends) == []
    assert names(first.backends) == names(second.backends) == ["a"]


def test_a_plugin_is_told_the_configuration_once_and_before_it_is_probed():
    heard = []

    def configured(config):
        heard.append(config)

    def probe(device):
        heard.append("probe")
        return []

    plugin = fake("a", tvr_configured=hookimpl(configured), probe=probe)
    manager_of(plugin, config=PluginConfig(order=("torch",), options={"a": {"splits": 4}}))
    config, then = heard
    assert then == "probe"
    assert config["options"]["a"]["splits"] == 4
    assert config["order"] == ("torch",)
    with pytest.raises(TypeError):
        config["options"]["a"]["splits"] = 8


# Probe.


@pytest.mark.parametrize(
    ("probe", "reasons"),
    [
        (lambda device: ["no driver", "no nvcc"], ["no driver", "no nvcc"]),
        (raising(OSError("libcuda.so")), ["tvr_probe raised OSError: libcuda.so"]),
        (raising(SystemExit(3)), ["tvr_probe raised SystemExit: 3"]),
        (lambda device: "no driver", None),
        (lambda device: [1], None),
        (lambda device: False, None),
    ],
)
def test_what_the_probe_says_makes_a_backend_unavailable_and_is_kept(probe, reasons):
    manager = manager_of(fake("a", probe=probe), fake("b"))
    assert names(manager.backends) == ["b"]
    a = manager.known["a"]
    assert a.status == "unavailable"
    if reasons is None:
        assert "it must return a list of reasons" in a.reasons[0]
    else:
        assert a.reasons == reasons
    with pytest.raises(BackendUnavailable, match="backend 'a' cannot be used: "):
        manager.require("a")


def test_an_interrupt_passes_through_a_probe():
    with pytest.raises(KeyboardInterrupt):
        manager_of(fake("a", probe=raising(KeyboardInterrupt())))


def test_an_empty_probe_and_no_probe_at_all_mean_it_can_run():
    assert names(manager_of(fake("a", probe=lambda device: []), fake("b")).backends) == ["a", "b"]


def test_the_probe_is_given_the_engines_device():
    seen = []
    manager_of(fake("a", probe=lambda device: seen.append(device) or []), device=GPU)
    assert seen == [GPU]


# Machines that lack something.


def no_nvcc(device):
    return ["nvcc was not found on PATH"]


def old_nvcc(device):
    raise RuntimeError("nvcc 11.8: unsupported gpu architecture 'compute_90'")


@pytest.mark.parametrize(
    ("probe", "reason"), [(no_nvcc, "nvcc was not found"), (old_nvcc, "unsupported gpu arch")]
)
def test_without_a_fit_compiler_the_next_backend_is_used_and_naming_it_is_an_error(probe, reason):
    cuda = fake("pycuda", probe=probe)
    table = table_of(cuda, fake("reference"), device=GPU)
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["reference"]}
    assert not cuda.asked
    with pytest.raises(BackendUnavailable, match=reason):
        table_of(cuda, fake("reference"), device=GPU, backend="pycuda")


def test_a_compiler_that_fails_at_bind_leads_to_the_next_backend():
    cuda = fake("pycuda", bind={"rope": old_nvcc_at_bind})
    table = table_of(cuda, fake("reference"), device=GPU)
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["reference"]}
    (passed,) = table.passed_over
    assert "unsupported gpu architecture" in passed.reasons[0]


def old_nvcc_at_bind(spec, device):
    raise RuntimeError("nvcc fatal: unsupported gpu architecture 'compute_90'")


def test_without_cuda_the_cpu_backend_is_chosen_and_naming_a_gpu_backend_is_an_error():
    def probe(device):
        return [] if device.type == "cuda" else [f"needs a CUDA device, not {device}"]

    gpu = fake("triton", {"rope": [Box(dtypes=["float32"])]}, probe=probe)
    table = table_of(gpu, fake("reference"), device=CPU)
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["reference"]}
    with pytest.raises(BackendUnavailable, match="needs a CUDA device, not cpu") as caught:
        table_of(gpu, fake("reference"), device=CPU, backend="triton")
    assert "\n" not in str(caught.value)


def test_a_box_for_cuda_only_is_passed_over_on_the_cpu():
    gpu = fake("gpu", {"rope": [Box(dtypes=["float32"])]})
    table = table_of(gpu, fake("reference"))
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["reference"]}


def test_a_table_is_for_the_device_that_was_probed():
    with pytest.raises(ConfigError, match="probed for cpu, not for cuda:0"):
        OpTable(manager_of(fake("a")), GPU)


# Explaining.


def test_explain_tells_of_every_backend_what_it_is_and_why_it_is_not_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = (
        "from tvr.contract import BackendInfo\n"
        "from tvr.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def tvr_backend_info(): return BackendInfo(name='idle', abi=(1, 0))\n"
    )
    install(
        tmp_path,
        "explained",
        version="1.2",
        entry_points={"idle": "idle_mod", "bad": "not_there_mod", "off": "off_mod"},
        sources={"idle_mod.py": source},
    )
    manager = manager_of(
        fake("given", {"rope": [BOX]}),
        fake("weak", probe=lambda device: ["no driver"]),
        config=PluginConfig(order=("torch",), disabled=("off",)),
        site=tmp_path,
    )
    told = manager.explain()
    assert json.loads(json.dumps(told)) == told
    assert told["order"] == ["given", "weak", "torch"]
    rows = {b["name"]: b for b in told["backends"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "given": "ok",
        "weak": "unavailable",
        "torch": "not installed",
        "idle": "not listed",
        "bad": "failed",
        "off": "disabled",
        "pycuda": "not installed",
        "triton": "not installed",
    }
    assert rows["given"]["ops"] == ["rope"]
    assert rows["given"]["distribution"] is None
    assert rows["weak"]["reasons"] == ["no driver"]
    assert (rows["idle"]["distribution"], rows["idle"]["version"]) == ("explained", "1.2")
    assert rows["idle"]["abi"] == "1.0"
    assert "use --backend" in rows["idle"]["reasons"][0]
    assert "No module named 'not_there_mod'" in rows["bad"]["reasons"][0]


ASIDE = """
from tvr.contract import BackendInfo, BoundOp, Box
from tvr.hookspecs import hookimpl
box = Box(dtypes=["float32"], devices=["cpu"])

@hookimpl
def tvr_backend_info():
    return BackendInfo(name="aside", abi=(1, 0), ops={"rope": [box], "argmax": [box]})

@hookimpl
def tvr_bind_rope(spec, device):
    return BoundOp(run=lambda q, k, positions, cos_sin_cache, *, q_out, k_out: (q_out, k_out))

@hookimpl
def tvr_bind_argmax(spec, device):
    return BoundOp(run=lambda logits, *, out: out)
"""


@pytest.fixture
def aside(tmp_path, monkeypatch):
    """A folder with an installed backend "aside" that no order lists."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return install(
        tmp_path, "x", entry_points={"aside": "aside_mod"}, sources={"aside_mod.py": ASIDE}
    )


def test_a_backend_that_is_named_is_explained_as_listed_first(aside):
    manager = manager_of(fake("a"), site=aside)
    assert manager.explain()["backends"][1]["status"] == "not listed"
    told = manager.explain(first="aside")
    assert told["order"] == ["aside", "a"]
    assert (told["backends"][0]["name"], told["backends"][0]["status"]) == ("aside", "ok")


def test_a_pinned_backend_need_not_be_listed(aside):
    manager = manager_of(fake("a"), config=PluginConfig(pins={"rope": "aside"}), site=aside)
    (told,) = (b for b in manager.explain()["backends"] if b["name"] == "aside")
    assert told["status"] == "ok"
    table = OpTable(manager, CPU)
    table.bind(spec_of("rope"))
    table.bind(spec_of("argmax"))
    assert table.served() == {"rope": ["aside"], "argmax": ["a"]}
