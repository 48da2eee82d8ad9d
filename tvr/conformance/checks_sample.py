"""Claims about `sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance.inputs import make_call, spoil_rows
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.oracle_sample import RowParams, allowed_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

_MOST_COUNTED = (1 << 14) - 1  # times; a count in the tables is twice that, or 1 more
_IN_PROMPT, _IN_OUTPUT = 1, 2  # in the tables: a token of the prompt, one that came out once
_AHEAD = 20.0  # of all other logits
_TINY = 1e-5  # a temperature


def check_token_is_the_one_asked_for(backend: Subject, case: Case) -> None:
    """Penalties, temperature, min_p, top_k, top_p and noise give the oracle's token."""
    _judge(backend, make_call(case, backend.torch_device))


def check_noise_is_that_of_seed_position_and_token(backend: Subject, case: Case) -> None:
    """Among equal logits the noise decides: all 64 bits of a seed and 32 of a position count."""
    call = _all_ask_for_softmax(make_call(case, backend.torch_device))
    call["logits"].zero_()
    call["output_positions"][::2] += 1 << 31
    _judge(backend, call)


def check_filters_keep_the_first_of_equals(backend: Subject, case: Case) -> None:
    """Equal logits are cut by top_k and top_p in order of their ids, the lowest first."""
    call = _all_ask_for_softmax(make_call(case, backend.torch_device))
    call["logits"].zero_()
    call["top_k"][::2] = max(1, call["logits"].shape[1] // 3)
    call["top_p"][1::2] = 0.25
    _judge(backend, call)


def check_cold_rows_take_the_best(backend: Subject, case: Case) -> None:
    """No temperature is too small: what overflows when it is divided is as far as can be."""
    call = _all_ask_for_softmax(make_call(case, backend.torch_device))
    call["temperature"].fill_(_TINY)
    best = torch.arange(len(call["out"])) * 37 % call["logits"].shape[1]
    rows = torch.arange(len(best))
    call["logits"][rows, best] = call["logits"].float().abs().max().to(call["logits"].dtype) + 1
    call["logits"][:, -1] = -torch.finfo(call["logits"].dtype).max
    call["top_p"][::2] = 0.5
    _judge(backend, call)


def check_greedy_takes_the_lowest_of_equals(backend: Subject, case: Case) -> None:
    """Temperature 0 is the lowest id of the largest logits, whatever else is asked for."""
    call = make_call(case, backend.torch_device)
    call["temperature"].zero_()
    vocab = call["logits"].shape[1]
    for i, logits in enumerate(call["logits"]):
        first = (i * 37 + 1) % (vocab - 1)
        logits[[first, (first + vocab - 1) // 2, vocab - 1]] = _AHEAD * 2
    _judge(backend, call)


def check_row_without_finite_best_gives_minus_one(backend: Subject, case: Case) -> None:
    """A NaN, an infinity or nothing but -inf gives -1, is not counted, and 0 is the row's token."""
    call = make_call(case, backend.torch_device)
    spoil_rows(call["logits"])
    _judge(backend, call)
    _judge_kept(backend, call)


def check_penalties_tell_prompt_from_output(backend: Subject, case: Case) -> None:
    """Repetition is for tokens of both, presence and frequency for those of the output alone."""
    call = make_call(case, backend.torch_device)
    call["temperature"].zero_()
    call["counts"].zero_()
    vocab = call["logits"].shape[1]
    call["logits"].zero_()
    for i, row in enumerate(call["rows"].tolist()):
        token, other = i % vocab, (i + 1) % vocab
        call["logits"][i, token], call["logits"][i, other] = _AHEAD, _AHEAD - 0.5
        seen = (_IN_PROMPT, _IN_OUTPUT, 3 * _IN_OUTPUT + _IN_PROMPT)[i % 3]
        call["counts"][row, token] = seen
        penalty = ("repetition", "presence", "frequency")[i // 3 % 3]
        for name, off in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
            call[name][row] = off if name != penalty else 1.5 if name == "repetition" else 0.6
    _judge(backend, call)


def check_choice_is_kept(backend: Subject, case: Case) -> None:
    """The token is the row's last one and, with penalties, one more of its kind; no other is."""
    _judge_kept(backend, make_call(case, backend.torch_device))


def check_counts_stop_where_int16_ends(backend: Subject, case: Case) -> None:
    """A token that came 16,383 times is counted no more; the prompt's bit stays as it is."""
    call = make_call(case, backend.torch_device)
    call["repetition"].fill_(1.5)
    call["counts"].copy_(2 * _MOST_COUNTED + (call["counts"] & 1))
    call["counts"][::2] -= 2  # once more, and no more
    _judge_kept(backend, call)


def check_spare_row_may_come_again(backend: Subject, case: Case) -> None:
    """Padding, all of it the spare row with whatever logits, changes no other row."""
    alone = make_call(case, backend.torch_device)
    backend.run(alone)
    call = make_call(case, backend.torch_device)
    padding = slice(1, None, 2)
    call["rows"][padding] = len(call["last_token"]) - 1
    call["logits"][padding] = torch.nan
    used = call["rows"][::2]
    backend.run(call)
    same_bits("out", call["out"][::2], alone["out"][::2])
    for name in ("counts", "last_token"):
        same_bits(f"{name} of the rows", call[name][used], alone[name][used])


def allowed_in(call: Call) -> list[set[int]]:
    """Return the tokens that the oracle allows in each row of a call."""
    logits, rows = call["logits"].cpu().float().numpy(), call["rows"].tolist()
    counts = call["counts"].cpu().numpy()
    return [
        allowed_tokens(logits[i], counts[row], _params(call, i, row)) for i, row in enumerate(rows)
    ]


def kept_choice(call: Call, out: Tensor) -> dict[str, Tensor]:
    """Return last_token and counts after the choice `out` [R] of a call that has not run."""
    last_token, counts = call["last_token"].clone(), call["counts"].clone()
    for i, (row, token) in enumerate(zip(call["rows"].tolist(), out.tolist(), strict=True)):
        last_token[row] = max(token, 0)
        is_counted = token >= 0 and _params(call, i, row).penalised
        if is_counted and counts[row, token] < 2 * _MOST_COUNTED:
            counts[row, token] += 2
    return {"last_token": last_token, "counts": counts}


def _params(call: Call, i: int, row: int) -> RowParams:
    names = ("temperature", "max_gap", "top_k", "top_p", "repetition", "presence", "frequency")
    return RowParams(
        **{name: call[name][row].item() for name in names},
        seed=int(call["seeds"][row]),
        position=int(call["output_positions"][i]),
    )


def _copy(call: Call) -> Call:
    return call.replace(**{name: tensor.clone() for name, tensor in call.written.items()})


def _judge(backend: Subject, call: Call) -> None:
    ran = _copy(call)
    backend.run(ran)
    allowed = allowed_in(call)
    for i, token in enumerate(ran["out"].tolist()):
        if token not in allowed[i]:
            right = " or ".join(map(str, sorted(allowed[i])))
            asked = _params(call, i, int(call["rows"][i]))
            raise CheckFailed(f"row {i} of out: is {token}, wanted {right}, for {asked}")


def _judge_kept(backend: Subject, call: Call) -> None:
    ran = _copy(call)
    backend.run(ran)
    for name, wanted in kept_choice(call, ran["out"]).items():
        same_bits(name, ran[name][:-1], wanted[:-1])  # the last row is that of padding


def _all_ask_for_softmax(call: Call) -> Call:
    """Change a call to rows of temperature 1 and nothing else."""
    off = {"temperature": 1.0, "max_gap": torch.inf, "top_k": call["logits"].shape[1], "top_p": 1.0}
    for name, value in (off | {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}).items():
        call[name].fill_(value)
    return call


OPS = ("sample",)
CHECKS = (
    Check(run=check_token_is_the_one_asked_for, ops=OPS),
    Check(run=check_noise_is_that_of_seed_position_and_token, ops=OPS),
    Check(run=check_filters_keep_the_first_of_equals, ops=OPS),
    Check(run=check_cold_rows_take_the_best, ops=OPS),
    Check(run=check_greedy_takes_the_lowest_of_equals, ops=OPS),
    Check(run=check_row_without_finite_best_gives_minus_one, ops=OPS),
    Check(run=check_penalties_tell_prompt_from_output, ops=OPS),
    Check(run=check_choice_is_kept, ops=OPS),
    Check(run=check_counts_stop_where_int16_ends, ops=OPS),
    Check(run=check_spare_row_may_come_again, ops=OPS),
)
