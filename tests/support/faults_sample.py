"""Faults of `sample`."""

from __future__ import annotations

from dataclasses import replace

import torch

from support.fault import Fault


def _with(a, **tables):
    """The tables of a call with some of them changed; counts and all stay the very same."""
    return replace(a["tables"], **tables)


def filters_before_the_penalties(right, spec, a):
    """Takes what the filters leave of the model's logits, and penalises that."""
    off = torch.ones_like(a["tables"].repetition)
    zero = torch.zeros_like(off)
    return right(tables=_with(a, repetition=off, presence=zero, frequency=zero))


def takes_top_p_of_all(right, spec, a):
    """Applies top_p to the mass of all tokens, not to that of the k best."""
    t = a["tables"]
    both = (t.top_k < spec.vocab_size) & (t.top_p < 1)
    return right(tables=_with(a, top_p=torch.where(both, t.top_p**2, t.top_p)))


def forgets_min_p(right, spec, a):
    t = a["tables"]
    return right(tables=_with(a, max_gap=torch.full_like(t.max_gap, torch.inf)))


def takes_half_of_a_seed(right, spec, a):
    return right(tables=_with(a, seeds=a["tables"].seeds & 0xFFFFFFFF))


def draws_without_the_position(right, spec, a):
    return right(output_positions=torch.zeros_like(a["output_positions"]))


def cuts_off_the_first_of_equals(right, spec, a):
    """Sorts with the higher id first among equals."""
    out = right(logits=a["logits"].flip(1))
    a["last_token"][a["rows"]] = out.copy_(torch.where(out < 0, out, spec.vocab_size - 1 - out))
    return out


def divides_before_it_subtracts(right, spec, a):
    heat = a["tables"].temperature[a["rows"], None]
    divided = (a["logits"].float() / torch.where(heat > 0, heat, 1)).half()
    return right(
        logits=divided.to(a["logits"].dtype),
        tables=_with(a, temperature=(a["tables"].temperature > 0).float()),
    )


def takes_the_last_of_equals_when_greedy(right, spec, a):
    out = right()
    flipped = a["logits"].float().flip(1).argmax(1)
    is_greedy = (a["tables"].temperature[a["rows"]] == 0) & (out >= 0)
    out.copy_(torch.where(is_greedy, spec.vocab_size - 1 - flipped, out))
    return out


def takes_an_infinite_logit(right, spec, a):
    out = right()
    infinite = a["logits"].isposinf().any(1) & ~a["logits"].isnan().any(1)
    return out.copy_(torch.where(infinite, a["logits"].float().argmax(1), out))


def takes_the_prompt_for_output(right, spec, a):
    counts = a["tables"].counts
    return right(tables=_with(a, counts=counts + counts % 2))


def keeps_no_token(right, spec, a):
    before = a["last_token"].clone()
    out = right()
    a["last_token"].copy_(before)
    return out


def counts_rows_without_penalties(right, spec, a):
    before = a["tables"].counts.clone()
    out = right()
    found = out >= 0
    a["tables"].counts.copy_(before)
    a["tables"].counts[a["rows"][found], out[found]] += 2
    return out


def counts_until_it_overflows(right, spec, a):
    counts = a["tables"].counts
    full = counts >= 32766
    out = right()
    found = out >= 0
    rows, tokens = a["rows"][found], out[found]
    counts[rows, tokens] += 2 * full[rows, tokens].to(torch.int16)
    return out


def chooses_for_the_row_above_padding(right, spec, a):
    """Takes the last logits of a row of the tables for all that have this row."""
    out = right()
    spare = a["rows"] == len(a["last_token"]) - 1
    if spare.any():
        a["last_token"][a["rows"]] = out.roll(1).clamp(min=0)
    return out


FAULTS = [
    Fault("token_is_the_one_asked_for", "sample", filters_before_the_penalties),
    Fault("token_is_the_one_asked_for", "sample", takes_top_p_of_all),
    Fault("token_is_the_one_asked_for", "sample", forgets_min_p),
    Fault("noise_is_that_of_seed_position_and_token", "sample", takes_half_of_a_seed),
    Fault("noise_is_that_of_seed_position_and_token", "sample", draws_without_the_position),
    Fault("filters_keep_the_first_of_equals", "sample", cuts_off_the_first_of_equals),
    Fault("cold_rows_take_the_best", "sample", divides_before_it_subtracts),
    Fault("greedy_takes_the_lowest_of_equals", "sample", takes_the_last_of_equals_when_greedy),
    Fault("row_without_finite_best_gives_minus_one", "sample", takes_an_infinite_logit),
    Fault("penalties_tell_prompt_from_output", "sample", takes_the_prompt_for_output),
    Fault("choice_is_kept", "sample", keeps_no_token),
    Fault("choice_is_kept", "sample", counts_rows_without_penalties),
    Fault("counts_stop_where_int16_ends", "sample", counts_until_it_overflows),
    Fault("spare_row_may_come_again", "sample", chooses_for_the_row_above_padding),
]
