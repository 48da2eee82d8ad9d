"""Is an op right at all? The accuracy claims of each op, to be held under unusual conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance.checks_attention import (
    check_lse_is_natural_log,
    check_output_matches_oracle,
)
from tvr.conformance.checks_dense import (
    check_gate_comes_first,
    check_largest_logit_wins,
    check_product_matches_oracle,
)
from tvr.conformance.checks_fused import check_fused_parts_round_one_by_one
from tvr.conformance.checks_kv import check_rows_are_stored_bit_equal
from tvr.conformance.checks_logprobs import check_logprobs_match_oracle
from tvr.conformance.checks_norm import (
    check_norm_rounds_where_declared,
    check_sum_is_rounded_before_the_norm,
)
from tvr.conformance.checks_prepare import (
    check_new_blocks_enter_both_tables,
    check_step_is_made_from_its_rows,
)
from tvr.conformance.checks_rope import check_rotation_is_rounded_once
from tvr.conformance.checks_sample import check_choice_is_kept, check_token_is_the_one_asked_for

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_CLAIMS = {
    "rms_norm": (check_norm_rounds_where_declared,),
    "add_rms_norm": (check_sum_is_rounded_before_the_norm,),
    "rope": (check_rotation_is_rounded_once,),
    "kv_write": (check_rows_are_stored_bit_equal,),
    "rope_kv_write": (check_rotation_is_rounded_once, check_rows_are_stored_bit_equal),
    "attention_decode": (check_output_matches_oracle,),
    "attention_prefill": (check_output_matches_oracle,),
    "silu_mul": (check_gate_comes_first,),
    "linear": (check_product_matches_oracle,),
    "fused_linear": (check_fused_parts_round_one_by_one,),
    "argmax": (check_largest_logit_wins,),
    "prepare_step": (check_step_is_made_from_its_rows, check_new_blocks_enter_both_tables),
    "sample": (check_token_is_the_one_asked_for, check_choice_is_kept),
    "top_logprobs": (check_logprobs_match_oracle,),
}


def require_right(backend: Subject, case: Case) -> None:
    """Raise `CheckFailed` unless the case's outputs are as close to the oracle as ever."""
    for claim in _CLAIMS[case.op]:
        claim(backend, case)
    if getattr(case.spec, "return_lse", False):
        check_lse_is_natural_log(backend, case)
