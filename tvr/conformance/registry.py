"""The list of all checks."""

from __future__ import annotations

from tvr.conformance import (
    checks_attention,
    checks_batching,
    checks_common,
    checks_dense,
    checks_kv,
    checks_needles,
    checks_norm,
    checks_paging,
    checks_rope,
)
from tvr.conformance.ledger import Check
from tvr.contract import OPS

CHECKS: tuple[Check, ...] = (
    *checks_common.CHECKS,
    *checks_norm.CHECKS,
    *checks_rope.CHECKS,
    *checks_kv.CHECKS,
    *checks_dense.CHECKS,
    *checks_attention.CHECKS,
    *checks_batching.CHECKS,
    *checks_paging.CHECKS,
    *checks_needles.CHECKS,
)

#: What is checked: each op, and all of them together in a model.
SUBJECTS = OPS
