"""Faults of `top_logprobs`."""

from __future__ import annotations

import math

import torch

from support.fault import Fault


def takes_logarithms_to_base_two(right, spec, a):
    result = right()
    a["values"].div_(math.log(2)).clamp_(min=-9999.0)
    return result


def sums_all_but_the_last_64(right, spec, a):
    """As a loop over whole tiles would."""
    result = right()
    x = a["logits"].double()
    kept = max(1, x.shape[1] // 64 * 64 - 64)
    a["values"].add_((x.logsumexp(1) - x[:, :kept].logsumexp(1))[:, None])
    return result


def sums_half_precision_exponentials(right, spec, a):
    result = right()
    below = a["logits"].float() - a["logits"].float().amax(1, keepdim=True)
    mass = below.exp().sum(1), below.exp().half().float().sum(1)
    a["values"].add_((mass[0].log() - mass[1].log())[:, None])
    return result


def takes_the_last_of_equals_first(right, spec, a):
    last = spec.vocab_size - 1
    result = right(logits=a["logits"].flip(1), tokens=last - a["tokens"].clamp(min=0))
    a["ids"].copy_(last - a["ids"])
    return result


def ranks_by_id_alone_among_equals(right, spec, a):
    """Counts all equals as likelier than the token."""
    result = right()
    x, token = a["logits"].float(), a["tokens"].clamp(min=0)[:, None]
    a["ranks"].copy_((x >= x.gather(1, token)).sum(1).clamp(min=1))
    return result


def ranks_by_rounded_logprobs(right, spec, a):
    return right(logits=a["logits"].float().log_softmax(dim=1))


def gives_minus_infinity(right, spec, a):
    result = right()
    a["values"][a["logits"].float().gather(1, a["ids"]) == -torch.inf] = -torch.inf
    return result


def exponentiates_before_it_subtracts(right, spec, a):
    result = right()
    x = a["logits"].float()
    a["values"].copy_((x.gather(1, a["ids"]) - x.exp().sum(1).log()[:, None]).clamp(min=-9999.0))
    return result


def takes_nan_for_the_floor(right, spec, a):
    result = right()
    a["values"].nan_to_num_(-9999.0)
    return result


def gives_an_id_past_the_vocabulary_for_a_nan(right, spec, a):
    result = right()
    a["ids"][:, 1:][a["values"][:, 1:].isnan()] = 2**31 - 1
    return result


def counts_a_token_of_minus_one_from_the_end(right, spec, a):
    return right(tokens=a["tokens"] % spec.vocab_size)


def writes_rows_of_the_width_it_was_bound_for(right, spec, a):
    wide = {name: a[name].new_empty(len(a[name]), 1 + spec.num_top) for name in ("ids", "values")}
    right(**wide)
    for name, x in wide.items():
        a[name].copy_(x.flatten()[: a[name].numel()].view(a[name].shape))
    return a["ids"], a["values"], a["ranks"]


FAULTS = [
    Fault(check, "top_logprobs", fault)
    for check, fault in (
        ("logprobs_match_oracle", takes_logarithms_to_base_two),
        ("logprobs_match_oracle", sums_all_but_the_last_64),
        ("logprobs_match_oracle", sums_half_precision_exponentials),
        ("lower_ids_are_likelier_among_equals", takes_the_last_of_equals_first),
        ("lower_ids_are_likelier_among_equals", ranks_by_id_alone_among_equals),
        ("ranks_are_those_of_logits", ranks_by_rounded_logprobs),
        ("impossible_tokens_get_the_floor", gives_minus_infinity),
        ("large_logits_do_not_overflow", exponentiates_before_it_subtracts),
        ("row_without_finite_best_gives_nan", takes_nan_for_the_floor),
        ("row_without_finite_best_gives_nan", gives_an_id_past_the_vocabulary_for_a_nan),
        ("row_without_token_does_no_harm", counts_a_token_of_minus_one_from_the_end),
        ("fewer_than_the_most_may_be_asked_for", writes_rows_of_the_width_it_was_bound_for),
    )
]
