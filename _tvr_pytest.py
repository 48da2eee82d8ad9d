"""The options of `pytest --pyargs tvr.conformance`.

pytest loads this file in every run of everybody who has tvr installed, so it imports nothing and
only adds options; the tests are in `tvr/conformance/test_conformance.py`.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option group `tvr`."""
    group = parser.getgroup("tvr", "tvr: test a backend with --pyargs tvr.conformance")
    add = group.addoption
    add("--tvr-backend", metavar="NAME", help="backend to test; `tvr backends` lists them")
    add("--tvr-op", metavar="OP", action="append", help="op to test; may be given again")
    add("--tvr-level", metavar="LEVEL", default="smoke", help="smoke (default), quick or full")
    add("--tvr-seed", metavar="N", type=int, default=0, help="seed of everything random")
    add("--tvr-max-examples", metavar="N", type=int, help="cases drawn for each check of an op")
    add("--tvr-device", metavar="D", default="cpu", help="cpu (default), cuda or cuda:N")
    add("--tvr-expect", metavar="FILE", help="file of expected failures")
    add("--tvr-plugins", metavar="FILE", help="a plugins.toml to use")
    add(
        "--tvr-in-process",
        action="store_true",
        help="run the backend in pytest's own process, for debuggers; a crash then ends pytest",
    )
