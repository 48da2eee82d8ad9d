"""`pytest --pyargs tvr.conformance --tvr-backend NAME`: one test for each check of each op."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tvr.conformance.pytest_door import checks_of_options
from tvr.errors import TvrError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the tests that the options ask for.

    Raises:
        CollectError: no backend was named, or it or another option cannot be used.
    """
    try:
        metafunc.parametrize("check", checks_of_options(metafunc.config))
    except TvrError as e:
        raise pytest.Collector.CollectError(f"tvr: {e}") from e


def test_conformance(check: Callable[[], None]) -> None:
    check()
