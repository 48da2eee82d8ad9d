"""Faults of the norms."""

from __future__ import annotations

import torch

from support.fault import Fault


def _normed(x, eps):
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def casts_after_the_weight(right, spec, a):
    return a["out"].copy_(_normed(a["x"], a["eps"]) * a["weight"].float())


def adds_eps_outside_the_root(right, spec, a):
    x = a["x"].float()
    normed = x / ((x * x).mean(-1, keepdim=True).sqrt() + a["eps"])
    return a["out"].copy_(normed.to(a["x"].dtype) * a["weight"])


def squares_in_the_activation_dtype(right, spec, a):
    x = a["x"]
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + a["eps"])
    return torch.mul(normed, a["weight"], out=a["out"])


def norms_the_unrounded_sum(right, spec, a):
    total = a["x"].float() + a["residual"].float()
    a["residual_out"].copy_(total)
    a["out"].copy_(_normed(total, a["eps"]).to(a["x"].dtype) * a["weight"])
    return a["out"], a["residual_out"]


def nudges_one_element_by_one_ulp(right, spec, a):
    out = right()
    out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0, dtype=out.dtype))
    return out


def has_an_eps_of_its_own(right, spec, a):
    return right(eps=1e-6)


def reads_the_residual_twice(right, spec, a):
    torch.add(a["x"], a["residual"], out=a["residual_out"])
    total = a["x"] + a["residual"]
    a["out"].copy_(_normed(total, a["eps"]).to(a["x"].dtype) * a["weight"])
    return a["out"], a["residual_out"]


def leaves_out_eps(right, spec, a):
    return right(eps=0.0)


def normalises_over_the_second_dim(right, spec, a):
    x = a["x"].float()
    normed = x * torch.rsqrt((x * x).mean(1, keepdim=True) + a["eps"])
    return a["out"].copy_(normed.to(a["x"].dtype) * a["weight"])


def means_over_one_less_if_batch_invariant(right, spec, a):
    out = right()
    n = spec.hidden_size
    return out.mul_(((n - 1) / n) ** 0.5) if spec.batch_invariant else out


FAULTS = [
    Fault("norm_rounds_where_declared", "rms_norm", casts_after_the_weight),
    Fault("norm_rounds_where_declared", "rms_norm", nudges_one_element_by_one_ulp),
    Fault("norm_eps_is_inside_the_root", "rms_norm", has_an_eps_of_its_own),
    Fault("norm_eps_is_inside_the_root", "rms_norm", adds_eps_outside_the_root),
    Fault("norm_squares_do_not_overflow", "rms_norm", squares_in_the_activation_dtype),
    Fault("sum_is_rounded_before_the_norm", "add_rms_norm", norms_the_unrounded_sum),
    Fault("residual_may_be_updated_in_place", "add_rms_norm", reads_the_residual_twice),
    Fault("zero_row_gives_zeros", "rms_norm", leaves_out_eps),
    Fault("leading_dims_are_free", "rms_norm", normalises_over_the_second_dim),
    Fault("norm_rounds_where_declared", "rms_norm", means_over_one_less_if_batch_invariant),
]
