"""The sample third-party packages beside the reference: they serve, are counted, and are right."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from support.fakes import manager_of
from support.plugins import install_sample
from support.specs import spec_of
from tvr.backends.torch_ref import plugin as reference
from tvr.conformance import check_backend, format_results
from tvr.core.ops import OpTable
from tvr.core.plugins import PluginConfig

DTYPES = ["float32", "bfloat16"]


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """Installs a package of tests/plugins; returns its module and a table that names it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package):
        monkeypatch.delitem(sys.modules, package, raising=False)
        install_sample(tmp_path, package)
        manager = manager_of(reference, config=PluginConfig(), site=tmp_path)
        table = OpTable(manager, manager.device, backend=package.removeprefix("tvr_"))
        return importlib.import_module(package), table

    return install


def reference_table():
    manager = manager_of(reference)
    return OpTable(manager, manager.device)


@pytest.mark.parametrize("package", ["tvr_only_rope", "tvr_only_rms_norm"])
def test_the_samples_keep_every_claim_of_the_contract(sample, package):
    module, _ = sample(package)
    results = check_backend(module)
    assert not any(r.failed for r in results), format_results(results)
    assert module.calls > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rope_only_plugin_serves_the_rope_of_rope_kv_write(sample, dtype):
    module, table = sample("tvr_only_rope")
    spec = spec_of("rope_kv_write", dtype=dtype)
    generator = torch.Generator().manual_seed(3)

    def run(bound):
        generator.manual_seed(3)
        q = torch.randn(5, 6, 16, generator=generator).to(getattr(torch, dtype))
        k, v = torch.randn(2, 5, 2, 16, generator=generator).to(q.dtype).unbind()
        angles = torch.randn(9, 8, generator=generator)
        cos_sin_cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
        k_cache, v_cache = torch.zeros(2, 2, 2, 16, 16, dtype=q.dtype).unbind()
        positions, slots = torch.tensor([0, 1, 8, 2, 3]), torch.tensor([0, 1, 17, -1, 31])
        bound.run(
            q, k, v, positions, cos_sin_cache, k_cache, v_cache, slots, q_out=q, k_out=k
        )  # fmt: skip
        return q, k, k_cache, v_cache

    found, wanted = run(table.bind(spec)), run(reference_table().bind(spec))
    assert module.calls == 1
    assert table.served()["rope_kv_write"] == ["only_rope + torch"]
    assert {p.op for p in table.passed_over} == {"rope_kv_write", "kv_write"}
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rms_norm_only_plugin_serves_the_norm_of_add_rms_norm(sample, dtype):
    module, table = sample("tvr_only_rms_norm")
    spec = spec_of("add_rms_norm", dtype=dtype)

    def run(bound):
        generator = torch.Generator().manual_seed(4)
        x, residual = torch.randn(2, 3, 64, generator=generator).to(getattr(torch, dtype)).unbind()
        weight = torch.randn(64, generator=generator).to(x.dtype)
        out = torch.empty_like(x)
        bound.run(x, residual, weight, eps=1e-5, out=out, residual_out=residual)
        return out, residual

    found, wanted = run(table.bind(spec)), run(reference_table().bind(spec))
    assert module.calls == 1
    assert table.served()["add_rms_norm"] == ["only_rms_norm"]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
