"""Claims about `linear`, `silu_mul` and `argmax`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.checks_common import in_wider_rows
from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits, small_frobenius_in_rows, within, within_ulps
from tvr.conformance.ledger import Check
from tvr.conformance.subject import Call
from tvr.conformance.tensors import dtype_name
from tvr.contract import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_LEFT = 2.0**-6  # of numbers that cancel but for this


def check_product_matches_oracle(backend: Subject, case: Case) -> None:
    """out = x @ weight.T + bias, to the rounding of its dtype."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    _judge_linear(call)


def check_strided_rows_are_multiplied_right(backend: Subject, case: Case) -> None:
    """x may be a slice of wider rows."""
    call = make_call(case, backend.torch_device)
    call = call.replace(x=in_wider_rows(call["x"]))
    backend.run(call)
    _judge_linear(call)


def check_bias_is_added_before_rounding(backend: Subject, case: Case) -> None:
    """A product that the dtype cannot hold loses its last bit after the bias, not before."""
    call = make_call(case, backend.torch_device)
    step_of_two = 2 / tolerance.EPS[dtype_name(call["out"])]  # from here on odd numbers are rounded
    call["x"].zero_()[:, :2] = 1.0
    call["weight"].zero_()[:, :2] = torch.tensor([step_of_two, 1.0])
    call["bias"].fill_(-step_of_two)
    backend.run(call)
    within("out", call["out"], torch.ones(call["out"].shape).double(), 0.0, "must be 1")


def check_partial_sums_are_not_rounded(backend: Subject, case: Case) -> None:
    """Sums of parts of a product are kept in fp32: large ones that cancel leave a 64th."""
    call = make_call(case, backend.torch_device)
    call["x"].fill_(1.0)
    num_rows, num_terms = call["weight"].shape
    call["weight"].copy_(_weights_that_cancel(num_rows, num_terms, case.generator()))
    if call["bias"] is not None:
        call["bias"].zero_()
    backend.run(call)
    wanted = torch.full(call["out"].shape, _LEFT, dtype=torch.float64)
    within_ulps("out", call["out"], wanted, tolerance.LINEAR_EXACT_ULPS)


def check_gate_comes_first(backend: Subject, case: Case) -> None:
    """out = silu(gate) * up, gate columns first, in fp32 and rounded once."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    is_fp32 = case.spec.dtype == "float32"
    ulps = tolerance.SILU_FP32_ULPS if is_fp32 else tolerance.SILU_ULPS
    within_ulps("out", call["out"], oracle.silu_mul(call["x"].cpu()), ulps)


def check_large_gates_do_not_overflow(backend: Subject, case: Case) -> None:
    """A gate of +-100 gives up * gate or 0, never NaN: exp(100) does not fit fp32."""
    call = make_call(case, backend.torch_device)
    width = call["out"].shape[1]
    call["x"][:, :width] = 100.0
    call["x"][:, : width // 2] = -100.0
    backend.run(call)
    up = call["x"][:, width:].cpu()
    wanted = torch.where(torch.arange(width) < width // 2, 0.0, 100.0 * up.double())
    dtype = call["out"].dtype
    limit = tolerance.ulp(wanted, case.spec.dtype).clamp_min(tolerance.SILU_ZERO)
    within("out", call["out"], wanted.to(dtype).double(), limit, "must be up * gate or 0")


def check_largest_logit_wins(backend: Subject, case: Case) -> None:
    """The id of the largest logit, in every row."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    _judge_argmax(call)


def check_lowest_id_wins_ties(backend: Subject, case: Case) -> None:
    """Among equal logits the lowest id is taken, near or far apart, and among all -inf."""
    call = make_call(case, backend.torch_device)
    vocab = call["logits"].shape[1]
    for row, logits in enumerate(call["logits"]):
        first = (row * 37 + 1) % (vocab - 1)
        logits[[first, (first + vocab - 1) // 2, vocab - 1]] = 50.0
    call["logits"][-1] = float("-inf")
    backend.run(call)
    _judge_argmax(call)


def check_nan_row_gives_minus_one(backend: Subject, case: Case) -> None:
    """A NaN anywhere in a row gives -1 for that row only."""
    vocab = make_call(case, backend.torch_device)["logits"].shape[1]
    for column in (0, vocab // 2, vocab - 1):
        call = make_call(case, backend.torch_device)
        call["logits"][-1, column] = float("nan")
        backend.run(call)
        _judge_argmax(call)


def _weights_that_cancel(rows: int, columns: int, g: torch.Generator) -> Tensor:
    """Return weights [rows, columns] whose rows sum to `_LEFT`, exact in every dtype.

    Each row holds numbers of its own and their negatives, shuffled. So whichever columns an op sums
    by themselves, in most rows their sum is large: too large for a dtype that rounds the 64th away.
    """
    numbers = torch.randint(1, 128, (rows, columns // 2), generator=g).float()  # 7 bits
    numbers[:, 0] = 1.0
    weights = torch.cat([numbers, -numbers, torch.zeros(rows, columns % 2)], dim=1)
    weights[:, columns // 2] += _LEFT
    return weights[:, torch.randperm(columns, generator=g)]


def _judge_linear(call: Call) -> None:
    x, weight = call["x"].cpu(), call["weight"].cpu()
    bias = None if call["bias"] is None else call["bias"].cpu()
    wanted, found = oracle.linear(x, weight, bias), call["out"].cpu()
    terms = x.abs().float() @ weight.abs().float().t()  # each element's, summed
    slack = tolerance.LINEAR_SLACK * terms.double()
    dtype = dtype_name(found)
    limit = tolerance.frobenius_limit(dtype, x.shape[1])
    slack_of_rows = torch.linalg.vector_norm(slack, dim=-1)
    small_frobenius_in_rows("out", found, wanted, limit, slack_of_rows)
    plain = oracle.low_precision_linear(x, weight, bias, found.dtype).double()
    error = (plain - wanted).abs().max().item()
    largest = tolerance.max_error_limit(dtype, error, wanted.abs().max().item())
    within("out", found, wanted, largest + slack, f"must be within {largest:.3g} and a little")


def _judge_argmax(call: Call) -> None:
    wanted = torch.tensor(oracle.argmax(call["logits"].cpu()))
    same_bits("out", call["out"], wanted)


def _has_bias_to_round(case: Case) -> bool:
    spec = case.spec
    assert isinstance(spec, LinearSpec)
    is_rounded = (spec.out_dtype or spec.dtype) != "float32"
    return spec.bias and is_rounded and spec.in_features > 1


def _has_several_terms(case: Case) -> bool:
    spec = case.spec
    assert isinstance(spec, LinearSpec)
    return spec.in_features > 1


CHECKS = (
    Check(run=check_product_matches_oracle, ops=("linear",)),
    Check(run=check_strided_rows_are_multiplied_right, ops=("linear",)),
    Check(run=check_partial_sums_are_not_rounded, ops=("linear",), applies=_has_several_terms),
    Check(run=check_bias_is_added_before_rounding, ops=("linear",), applies=_has_bias_to_round),
    Check(run=check_gate_comes_first, ops=("silu_mul",)),
    Check(run=check_large_gates_do_not_overflow, ops=("silu_mul",)),
    Check(run=check_largest_logit_wins, ops=("argmax",)),
    Check(run=check_lowest_id_wins_ties, ops=("argmax",)),
    Check(run=check_nan_row_gives_minus_one, ops=("argmax",)),
)
