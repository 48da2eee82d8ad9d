"""Faults of `fused_linear`. Each does the parts' work by itself, in another way."""

from __future__ import annotations

import torch

from support.fault import Fault, as_if_contiguous


def _product(spec, a, x):
    weight, bias = a["packed"]
    product = x.float() @ weight[: spec.out_features, : spec.in_features].float().t()
    return product if bias is None else product + bias[: spec.out_features].float()


def _normed(spec, a, *, once=False, eps_outside=False, half_squares=False):
    if not spec.rms_norm:
        return a["x"]
    x, eps = a["x"].float(), a["eps"]
    squares = (a["x"] * a["x"]).float() if half_squares else x * x
    mean = squares.mean(-1, keepdim=True)
    normed = x / (mean.sqrt() + eps) if eps_outside else x * torch.rsqrt(mean + eps)
    if once:
        return (normed * a["norm_weight"].float()).to(a["x"].dtype)
    return normed.to(a["x"].dtype) * a["norm_weight"]


def _finished(spec, a, product, out):
    if spec.silu_mul:
        gate, up = product.float().chunk(2, -1)
        return out.copy_(torch.nn.functional.silu(gate) * up)
    return out.copy_(a["residual"] + product if spec.add else product)


def keeps_the_norm_in_fp32(right, spec, a):
    """Multiplies by the norm's weight before it rounds: once, not twice."""
    product = _product(spec, a, _normed(spec, a, once=True)).to(a["x"].dtype)
    return _finished(spec, a, product, a["out"])


def forgets_the_norm(right, spec, a):
    return _finished(spec, a, _product(spec, a, a["x"]).to(a["x"].dtype), a["out"])


def keeps_gate_and_up_in_fp32(right, spec, a):
    if not spec.silu_mul:
        return right()
    return _finished(spec, a, _product(spec, a, _normed(spec, a)), a["out"])


def takes_turns_of_gate_and_up_for_halves(right, spec, a):
    if not spec.silu_mul:
        return right()
    product = _product(spec, a, _normed(spec, a)).to(a["x"].dtype)
    turns = torch.cat([product[:, ::2], product[:, 1::2]], dim=1)
    return _finished(spec, a, turns, a["out"])


def adds_the_unrounded_product(right, spec, a):
    if not spec.add:
        return right()
    return a["out"].copy_(a["residual"].float() + _product(spec, a, _normed(spec, a)))


def rounds_the_residual_to_bfloat16(right, spec, a):
    if not spec.add:
        return right()
    return right(residual=a["residual"].bfloat16().to(a["residual"].dtype))


def stores_the_product_before_it_reads_the_residual(right, spec, a):
    if not spec.add:
        return right()
    a["out"].copy_(_product(spec, a, _normed(spec, a)))
    return a["out"].add_(a["residual"])


def adds_eps_to_the_root(right, spec, a):
    product = _product(spec, a, _normed(spec, a, eps_outside=True)).to(a["x"].dtype)
    return _finished(spec, a, product, a["out"])


def squares_in_the_activation_dtype(right, spec, a):
    product = _product(spec, a, _normed(spec, a, half_squares=True)).to(a["x"].dtype)
    return _finished(spec, a, product, a["out"])


def divides_two_exponentials_of_its_gate(right, spec, a):
    if not spec.silu_mul:
        return right()
    product = _product(spec, a, _normed(spec, a)).to(a["x"].dtype)
    gate, up = product.float().chunk(2, -1)
    return a["out"].copy_(gate * (gate.exp() / (1 + gate.exp())) * up)


def takes_the_residual_for_contiguous(right, spec, a):
    return right(residual=as_if_contiguous(a["residual"])) if spec.add else right()


FAULTS = [
    Fault("fused_parts_round_one_by_one", "fused_linear", forgets_the_norm),
    Fault("fused_parts_round_one_by_one", "fused_linear", keeps_the_norm_in_fp32),
    Fault("fused_parts_round_one_by_one", "fused_linear", keeps_gate_and_up_in_fp32),
    Fault("fused_parts_round_one_by_one", "fused_linear", takes_turns_of_gate_and_up_for_halves),
    Fault("fused_rows_may_be_strided", "fused_linear", takes_the_residual_for_contiguous),
    Fault("product_is_rounded_before_the_add", "fused_linear", adds_the_unrounded_product),
    Fault("large_residual_keeps_its_digits", "fused_linear", rounds_the_residual_to_bfloat16),
    Fault(
        "out_may_be_the_residual", "fused_linear", stores_the_product_before_it_reads_the_residual
    ),
    Fault("fused_norm_uses_its_eps", "fused_linear", adds_eps_to_the_root),
    Fault("fused_squares_do_not_overflow", "fused_linear", squares_in_the_activation_dtype),
    Fault(
        "large_fused_gates_do_not_overflow", "fused_linear", divides_two_exponentials_of_its_gate
    ),
]
