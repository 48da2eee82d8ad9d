"""Claims about `top_logprobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.inputs import make_call, spoil_rows
from tvr.conformance.judge import same_bits, within
from tvr.conformance.ledger import Check, CheckFailed
from tvr.contract import LOGPROB_FLOOR, TopLogprobsSpec

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

_AHEAD = 20.0  # of all other logits
_FAR = 30000.0  # within fp16
_TINY = 2.0**-24  # exact in every dtype, and nothing beside `_AHEAD` in fp32


def check_logprobs_match_oracle(backend: Subject, case: Case) -> None:
    """Values are the log-softmax, ids those of the likeliest, the rank that of the token."""
    _judge(backend, make_call(case, backend.torch_device))


def check_lower_ids_are_likelier_among_equals(backend: Subject, case: Case) -> None:
    """Equal logits are ranked by id, the lowest first, near or far apart, and where all are."""
    call = make_call(case, backend.torch_device)
    vocab = call["logits"].shape[1]
    for i, logits in enumerate(call["logits"]):
        some = [(i * 37 + 1) % vocab, vocab // 2, vocab - 1]
        logits[some] = _AHEAD
        call["tokens"][i] = some[i % 3]
    call["logits"][0, ::2] = 0.0
    call["logits"][0, 1::2] = -0.0
    _judge(backend, call)


def check_ranks_are_those_of_logits(backend: Subject, case: Case) -> None:
    """Logits that differ are told apart, though their log-probabilities round to the same."""
    call = make_call(case, backend.torch_device)
    vocab = call["logits"].shape[1]
    call["logits"].copy_((torch.arange(vocab) * 37 % 64 + 1) * _TINY)
    call["logits"][:, 0] = _AHEAD
    _judge(backend, call)


def check_impossible_tokens_get_the_floor(backend: Subject, case: Case) -> None:
    """Tokens of -inf, and those that are far below the best, have a log-probability of -9999."""
    call = make_call(case, backend.torch_device)
    vocab = call["logits"].shape[1]
    call["logits"][:, vocab // 2 :] = -torch.inf
    call["logits"][:, 1:3] = -_FAR
    call["logits"][:, 0] = _AHEAD
    call["tokens"][::2] = vocab - 1
    _judge(backend, call)


def check_large_logits_do_not_overflow(backend: Subject, case: Case) -> None:
    """Logits of +-30000 are measured from the best one: exp(100) does not fit fp32."""
    call = make_call(case, backend.torch_device)
    call["logits"][::2] += _FAR
    call["logits"][1::2] -= _FAR
    _judge(backend, call)


def check_row_without_finite_best_gives_nan(backend: Subject, case: Case) -> None:
    """A NaN, an infinity or nothing but -inf gives NaN, ids of the vocabulary, and no harm."""
    call = make_call(case, backend.torch_device)
    spoil_rows(call["logits"])
    _judge(backend, call)


def check_row_without_token_does_no_harm(backend: Subject, case: Case) -> None:
    """A token of -1, as in padding and in rows without a choice, counts as 0."""
    call = make_call(case, backend.torch_device)
    call["tokens"][::2] = -1
    _judge(backend, call)


def check_fewer_than_the_most_may_be_asked_for(backend: Subject, case: Case) -> None:
    """Bound for `num_top` of the likeliest, it gives as many as there is room for, or none."""
    assert isinstance(case.spec, TopLogprobsSpec)
    for k in sorted({0, case.spec.num_top // 2, case.spec.num_top}):
        call = make_call(case, backend.torch_device)
        room = {name: call[name][:, : 1 + k].contiguous() for name in ("ids", "values")}
        _judge(backend, call.replace(**room))


def judge_logprobs(call: Call) -> None:
    """Hold what a call has written against the oracle.

    Raises:
        CheckFailed: says what is wrong.
    """
    ids, values, ranks = (call[name].cpu() for name in ("ids", "values", "ranks"))
    logits, k = call["logits"].cpu(), ids.shape[1] - 1
    is_sound = logits.float().amax(dim=-1).isfinite()
    wanted = oracle.top_logprobs(logits[is_sound], call["tokens"].cpu()[is_sound], k)
    same_bits("ids", ids[is_sound], wanted.ids)
    same_bits("ranks", ranks[is_sound], wanted.ranks)
    exact = wanted.values.clamp(min=LOGPROB_FLOOR)
    limit = tolerance.logprob_limit(exact)
    within("values", values[is_sound], exact, limit, "must be the log-softmax")
    ids, values, ranks = ids[~is_sound], values[~is_sound], ranks[~is_sound]
    vocab = logits.shape[1]
    if not values.isnan().all():
        raise CheckFailed("values of a row whose largest logit is not finite: must be NaN")
    if ((ids < 0) | (ids >= vocab)).any() or ((ranks < 1) | (ranks > vocab)).any():
        raise CheckFailed(
            f"ids and ranks of a row whose largest logit is not finite: must be within {vocab}"
        )


def _judge(backend: Subject, call: Call) -> None:
    backend.run(call)
    judge_logprobs(call)


OPS = ("top_logprobs",)
CHECKS = (
    Check(run=check_logprobs_match_oracle, ops=OPS),
    Check(run=check_lower_ids_are_likelier_among_equals, ops=OPS),
    Check(run=check_ranks_are_those_of_logits, ops=OPS),
    Check(run=check_impossible_tokens_get_the_floor, ops=OPS),
    Check(run=check_large_logits_do_not_overflow, ops=OPS),
    Check(run=check_row_without_finite_best_gives_nan, ops=OPS),
    Check(run=check_row_without_token_does_no_harm, ops=OPS),
    Check(run=check_fewer_than_the_most_may_be_asked_for, ops=OPS),
)
