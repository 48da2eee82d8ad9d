"""The list of all checks."""

from __future__ import annotations

from tvr.conformance import (
    checks_attention,
    checks_batching,
    checks_common,
    checks_dense,
    checks_fused,
    checks_graph,
    checks_kv,
    checks_logprobs,
    checks_needles,
    checks_norm,
    checks_paging,
    checks_plan,
    checks_prepare,
    checks_rope,
    checks_sample,
    checks_stream,
    checks_workspace,
    engine_checks,
)
from tvr.conformance.ledger import Check
from tvr.conformance.model_spec import ENGINE
from tvr.contract import OPS

CHECKS: tuple[Check, ...] = (
    *checks_common.CHECKS,
    *checks_norm.CHECKS,
    *checks_rope.CHECKS,
    *checks_kv.CHECKS,
    *checks_dense.CHECKS,
    *checks_fused.CHECKS,
    *checks_prepare.CHECKS,
    *checks_sample.CHECKS,
    *checks_logprobs.CHECKS,
    *checks_attention.CHECKS,
    *checks_batching.CHECKS,
    *checks_paging.CHECKS,
    *checks_needles.CHECKS,
    *checks_workspace.CHECKS,
    *checks_plan.CHECKS,
    *checks_graph.CHECKS,
    *checks_stream.CHECKS,
    *engine_checks.CHECKS,
)

#: What is checked: each op, and all of them together in a model.
SUBJECTS = (*OPS, *ENGINE)
