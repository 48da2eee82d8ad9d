"""Claims about `fused_linear`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import tolerance
from tvr.conformance.checks_common import in_wider_rows
from tvr.conformance.fused_range import fused_range
from tvr.conformance.inputs import make_call
from tvr.conformance.judge import between, within
from tvr.conformance.ledger import Check
from tvr.conformance.relations import same
from tvr.contract import FusedLinearSpec, matching_box

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

_OPS = ("fused_linear",)


def check_fused_parts_round_one_by_one(backend: Subject, case: Case) -> None:
    """Norm, product, and what follows it are each rounded as the ops of their names round."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    _judge(backend, call)


def check_fused_rows_may_be_strided(backend: Subject, case: Case) -> None:
    """x and residual may be slices of wider rows."""
    call = make_call(case, backend.torch_device)
    names = [name for name in ("x", "residual") if call[name] is not None]
    call = call.replace(**{name: in_wider_rows(call[name]) for name in names})
    backend.run(call)
    _judge(backend, call)


def check_out_may_be_the_residual(backend: Subject, case: Case) -> None:
    """The sum may take the place of the residual, which every layer of a model wants."""
    apart, in_place = (make_call(case, backend.torch_device) for _ in range(2))
    backend.run(apart)
    in_place = in_place.replace(out=in_place["residual"])
    backend.run(in_place)
    same(backend, in_place, "out", in_place["out"], apart["out"])


def check_product_is_rounded_before_the_add(backend: Subject, case: Case) -> None:
    """1 and less than half of the next step are 1, before as much of the residual is added."""
    call = make_call(case, backend.torch_device)
    little = 0.375 * tolerance.EPS[case.spec.dtype]
    call["x"].zero_()[:, :2] = 1.0
    call["weight"].zero_()[:, :2] = torch.tensor([1.0, little])
    call["residual"].fill_(little)
    if call["bias"] is not None:
        call["bias"].zero_()
    backend.run(call)
    within("out", call["out"], torch.ones(call["out"].shape).double(), 0.0, "must be 1")


def check_large_residual_keeps_its_digits(backend: Subject, case: Case) -> None:
    """A residual a thousand times the product is added to in fp32, and rounded once."""
    call = make_call(case, backend.torch_device)
    call["residual"].mul_(1000.0)
    backend.run(call)
    _judge(backend, call)


def check_fused_norm_uses_its_eps(backend: Subject, case: Case) -> None:
    """eps is added to the mean square, before the root, and is the one given, for zeros too."""
    for value, eps in ((1e-3, 1e-5), (1e-3, 1e-6), (0.0, 1e-5)):
        call = make_call(case, backend.torch_device).replace(eps=eps)
        call["x"].mul_(value)
        backend.run(call)
        _judge(backend, call)


def check_fused_squares_do_not_overflow(backend: Subject, case: Case) -> None:
    """Squares are summed in fp32: 300 and 60000 overflow fp16, or nearly all their digits."""
    for value in (300.0, 60000.0):
        call = make_call(case, backend.torch_device)
        call["x"].fill_(value)
        backend.run(call)
        _judge(backend, call)


def check_large_fused_gates_do_not_overflow(backend: Subject, case: Case) -> None:
    """A gate of +-100 gives up * gate or 0, never NaN: exp(100) does not fit fp32."""
    call = make_call(case, backend.torch_device)
    width = call["out"].shape[1]
    call["x"].zero_()[:, 0] = 1.0
    call["weight"][:width, 0] = 100.0
    call["weight"][: width // 2, 0] = -100.0
    if call["bias"] is not None:
        call["bias"].zero_()
    backend.run(call)
    up = call["weight"][width:, 0].cpu().double()
    wanted = torch.where(torch.arange(width) < width // 2, 0.0, 100.0 * up).expand(
        len(call["x"]), -1
    )
    limit = tolerance.ulp(wanted, case.spec.dtype).clamp_min(tolerance.SILU_ZERO)
    within("out", call["out"], wanted, limit, "must be up * gate or 0")


def _judge(backend: Subject, call: Call) -> None:
    box = matching_box(backend.info, call.spec, backend.device)
    assert box is not None
    on_cpu = {name: x.cpu() for name, x in call.args.items() if isinstance(x, torch.Tensor)}
    # In place the residual is gone: such calls are held against others.
    right = fused_range(call.replace(**on_cpu), box.norm_rounding)
    between("out", call["out"].cpu(), (right.low, right.high), right.wanted)


def _spec(case: Case) -> FusedLinearSpec:
    assert isinstance(case.spec, FusedLinearSpec)
    return case.spec


def _adds(case: Case) -> bool:
    return _spec(case).add


def _adds_a_plain_product(case: Case) -> bool:
    spec = _spec(case)
    return spec.add and not spec.rms_norm and spec.dtype != "float32" and spec.in_features > 1


def _norms(case: Case) -> bool:
    return _spec(case).rms_norm


def _gates_a_plain_product(case: Case) -> bool:
    return _spec(case).silu_mul and not _spec(case).rms_norm


CHECKS = (
    Check(run=check_fused_parts_round_one_by_one, ops=_OPS),
    Check(run=check_fused_rows_may_be_strided, ops=_OPS),
    Check(run=check_out_may_be_the_residual, ops=_OPS, applies=_adds),
    Check(run=check_product_is_rounded_before_the_add, ops=_OPS, applies=_adds_a_plain_product),
    Check(run=check_large_residual_keeps_its_digits, ops=_OPS, applies=_adds),
    Check(run=check_fused_norm_uses_its_eps, ops=_OPS, applies=_norms),
    Check(run=check_fused_squares_do_not_overflow, ops=_OPS, applies=_norms),
    Check(run=check_large_fused_gates_do_not_overflow, ops=_OPS, applies=_gates_a_plain_product),
)
