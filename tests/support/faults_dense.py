"""Faults of `linear`, `silu_mul` and `argmax`."""

from __future__ import annotations

import torch

from support.fault import Fault


def drops_the_bias(right, spec, a):
    return right(packed=(a["packed"][0], None))


def swaps_gate_and_up(right, spec, a):
    gate, up = a["x"].chunk(2, dim=-1)
    return right(x=torch.cat([up, gate], dim=-1))


def rounds_twice(right, spec, a):
    gate, up = a["x"].chunk(2, dim=-1)
    return torch.mul(torch.nn.functional.silu(gate), up, out=a["out"])


def divides_two_exponentials(right, spec, a):
    gate, up = a["x"].float().chunk(2, dim=-1)
    return a["out"].copy_(gate * (gate.exp() / (1 + gate.exp())) * up)


def searches_half_the_vocabulary(right, spec, a):
    return right(logits=a["logits"][:, : spec.vocab_size // 2])


def takes_the_last_of_equals(right, spec, a):
    out = right(logits=a["logits"].flip(1))
    return out.copy_(torch.where(out < 0, out, spec.vocab_size - 1 - out))


def takes_nan_for_the_largest(right, spec, a):
    return torch.argmax(a["logits"], dim=-1, out=a["out"])


def accumulates_in_the_activation_dtype(right, spec, a):
    weight, bias = a["packed"]
    total = torch.zeros_like(a["out"])
    for start in range(0, spec.in_features, 8):
        piece = slice(start, start + 8)
        total += (a["x"][:, piece].float() @ weight[:, piece].float().t()).to(total.dtype)
    return a["out"].copy_(total if bias is None else total + bias)


def rounds_before_it_widens(right, spec, a):
    return right().copy_(a["out"].to(a["x"].dtype))


def _adds_rounded_sums_of(columns):
    """Splits the columns in two and rounds both sums before it adds them."""

    def fault(right, spec, a):
        weight, bias = a["packed"]
        x, weight = a["x"].float(), weight[: spec.out_features, : spec.in_features].float()
        total = torch.zeros_like(a["out"])
        for part in columns(torch.arange(spec.in_features)):
            total += (x[:, part] @ weight[:, part].t()).to(total.dtype)
        return a["out"].copy_(total if bias is None else total + bias[: spec.out_features])

    return fault


def adds_rounded_sums_of_halves(right, spec, a):
    return _adds_rounded_sums_of(lambda columns: columns.chunk(2))(right, spec, a)


def adds_rounded_sums_of_every_other(right, spec, a):
    return _adds_rounded_sums_of(lambda columns: (columns[::2], columns[1::2]))(right, spec, a)


def adds_the_bias_to_the_rounded_product(right, spec, a):
    weight, bias = a["packed"]
    out = right(packed=(weight, None))
    return out if bias is None else out.add_(bias[: out.shape[1]])


FAULTS = [
    Fault("product_matches_oracle", "linear", drops_the_bias),
    Fault("product_matches_oracle", "linear", rounds_before_it_widens),
    Fault("gate_comes_first", "silu_mul", swaps_gate_and_up),
    Fault("gate_comes_first", "silu_mul", rounds_twice),
    Fault("large_gates_do_not_overflow", "silu_mul", divides_two_exponentials),
    Fault("largest_logit_wins", "argmax", searches_half_the_vocabulary),
    Fault("lowest_id_wins_ties", "argmax", takes_the_last_of_equals),
    Fault("nan_row_gives_minus_one", "argmax", takes_nan_for_the_largest),
    Fault("product_matches_oracle", "linear", accumulates_in_the_activation_dtype),
    Fault("partial_sums_are_not_rounded", "linear", adds_rounded_sums_of_halves),
    Fault("partial_sums_are_not_rounded", "linear", adds_rounded_sums_of_every_other),
    Fault("bias_is_added_before_rounding", "linear", adds_the_bias_to_the_rounded_product),
]
