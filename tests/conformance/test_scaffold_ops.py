"""The ops that `tvr backend new` writes keep every claim of the contract, as they stand."""

from __future__ import annotations

import importlib

import pytest

from support.scaffolds import install_scaffold
from tvr.conformance import check_backend, format_results
from tvr.contract import OPS


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes a package and imports its hooks."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_and_import(name, ops):
        package = install_scaffold(tmp_path, name, ops)
        return importlib.import_module(f"{package.module}.plugin")

    return write_and_import


@pytest.mark.parametrize("op", OPS)
def test_an_op_by_itself_keeps_every_claim(op, load):
    plugin = load(f"only-{op}", [op])
    assert set(plugin.INFO.ops) == {op}
    results = check_backend(plugin, ops=[op])
    assert not any(r.failed for r in results), format_results(results)


def test_all_ops_in_one_package_bind_what_they_declare(load):
    plugin = load("all-ops", OPS)
    assert tuple(plugin.INFO.ops) == OPS
    results = check_backend(plugin, checks=["declared_support_is_bound"])
    assert not any(r.failed for r in results), format_results(results)
