"""Claims about `rms_norm` and `add_rms_norm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance import oracle, tolerance
from tvr.conformance.checks_common import TOKEN_ARGS
from tvr.conformance.inputs import make_call
from tvr.conformance.judge import between, same_bits, within, within_ulps
from tvr.conformance.ledger import Check
from tvr.conformance.relations import same
from tvr.conformance.subject import Call
from tvr.contract import AddRmsNormSpec, matching_box

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


def check_norm_rounds_where_declared(backend: Subject, case: Case) -> None:
    """Normalise in fp32, round, multiply by the weight, round: in this order ("twice")."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    _judge(backend, call)


def check_norm_eps_is_inside_the_root(backend: Subject, case: Case) -> None:
    """eps is added to the mean square, before the root, and is the one given."""
    for eps in (1e-5, 1e-6):
        call = _filled(case, backend, 1e-4).replace(eps=eps)
        backend.run(call)
        _judge(backend, call)


def check_norm_squares_do_not_overflow(backend: Subject, case: Case) -> None:
    """Squares are summed in fp32: 300 and 60000 overflow fp16, or nearly all their digits."""
    for value in (300.0, 60000.0):
        call = _filled(case, backend, value)
        backend.run(call)
        _judge(backend, call)


def check_zero_row_gives_zeros(backend: Subject, case: Case) -> None:
    """A row of zeros is divided by the root of eps, not by 0."""
    call = _filled(case, backend, 0.0)
    backend.run(call)
    within("out", call["out"], call["x"].cpu().double(), 0.0, "must be 0")


def check_leading_dims_are_free(backend: Subject, case: Case) -> None:
    """Rows may stand in more dimensions than one: [rows, 1, hidden]."""
    call = make_call(case, backend.torch_device)
    rows = TOKEN_ARGS & call.args.keys()
    backend.run(call.replace(**{name: call[name].unsqueeze(1) for name in rows}))
    _judge(backend, call)


def check_sum_is_rounded_before_the_norm(backend: Subject, case: Case) -> None:
    """residual_out is the sum rounded once, and the norm reads that."""
    call = make_call(case, backend.torch_device)
    wanted = (call["x"].cpu().double() + call["residual"].cpu().double()).to(call["x"].dtype)
    backend.run(call)
    same_bits("residual_out", call["residual_out"], wanted)
    _judge(backend, call)


def check_residual_may_be_updated_in_place(backend: Subject, case: Case) -> None:
    """residual_out may be residual itself."""
    apart, in_place = (make_call(case, backend.torch_device) for _ in range(2))
    backend.run(apart)
    in_place = in_place.replace(residual_out=in_place["residual"])
    backend.run(in_place)
    for name in ("residual_out", "out"):
        same(backend, in_place, name, in_place[name], apart[name])


def _filled(case: Case, backend: Subject, value: float) -> Call:
    call = make_call(case, backend.torch_device)
    call["x"].fill_(value)
    call["weight"].fill_(1.0)
    if isinstance(case.spec, AddRmsNormSpec):
        call["residual"].zero_()
    return call


def _judge(backend: Subject, call: Call) -> None:
    """Hold `out` against the oracle that rounds where the backend declares to round."""
    box = matching_box(backend.info, call.spec, backend.device)
    assert box is not None
    x = call["residual_out" if isinstance(call.spec, AddRmsNormSpec) else "x"].cpu()
    found, weight = call["out"].cpu(), call["weight"].cpu()

    def exact(error: float) -> Tensor:
        return oracle.rms_norm(x, weight, call["eps"], box.norm_rounding, relative_error=error)

    wanted = exact(0.0)
    if call.spec.dtype == "float32":
        within_ulps("out", found, wanted.double(), tolerance.NORM_FP32_ULPS)
        return
    ends = exact(-tolerance.NORM_ARITHMETIC), exact(tolerance.NORM_ARITHMETIC)
    between(f"out of a norm that rounds {box.norm_rounding}", found, ends, wanted)


_NORMS = ("rms_norm", "add_rms_norm")

CHECKS = (
    Check(run=check_norm_rounds_where_declared, ops=_NORMS),
    Check(run=check_norm_eps_is_inside_the_root, ops=_NORMS),
    Check(run=check_norm_squares_do_not_overflow, ops=_NORMS),
    Check(run=check_zero_row_gives_zeros, ops=_NORMS),
    Check(run=check_leading_dims_are_free, ops=_NORMS),
    Check(run=check_sum_is_rounded_before_the_norm, ops=("add_rms_norm",)),
    Check(run=check_residual_may_be_updated_in_place, ops=("add_rms_norm",)),
)
