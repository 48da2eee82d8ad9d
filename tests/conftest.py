"""Settings of all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, and more threads would wait for each other. Before torch is imported:
    # it asks once. What tests start inherits it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with the slow tests: at the end one would keep the others waiting."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny tensors: two would wait for each other at every small product."""
    import torch  # here, so that collecting the tests of the pure core needs no torch

    before = torch.get_num_threads()
    if request.node.get_closest_marker("slow") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a test imported from a temporary folder: another's may have the same name."""
    yield
    base = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name, module in sys.modules.copy().items():  # other threads may import
        # a thousand modules after each of thousands of tests: `Path` would take a minute
        if (getattr(module, "__file__", None) or "").startswith(base):
            del sys.modules[name]
