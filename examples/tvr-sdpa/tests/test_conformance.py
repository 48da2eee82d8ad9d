"""The whole proof: every check of tvr's conformance suite on the ops that this package declares."""

from __future__ import annotations

import tvr_sdpa
from tvr.conformance import parametrize_checks


@parametrize_checks("sdpa", ops=list(tvr_sdpa.INFO.ops), level="quick")
def test_the_backend_keeps_the_contract(check):
    check()
