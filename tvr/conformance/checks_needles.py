"""Claims about which keys attention sees and which head reads which.

Noise finds rounding bugs; these inputs find indexing bugs. Every answer is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tvr.conformance import tolerance
from tvr.conformance.judge import within
from tvr.conformance.ledger import Check
from tvr.conformance.sequences import (
    Sequences,
    attention_call,
    attention_spec,
    random_sequences,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

_NEEDLE_SCORE = 40.0  # every other key scores 0: exp(-40) is below fp32's eps
_RAMP = 64  # values repeat after so many tokens, to be exact in bf16
_MAX_EDGES = 16  # block edges tried in one sequence, evenly spread


def check_needle_is_found(backend: Subject, case: Case) -> None:
    """One key aligned with the query outweighs all others: at both ends, at each block edge."""
    spec = attention_spec(case)
    sequences = random_sequences(case)
    # Signs of a KV head's needle, shared by the query heads that read it.
    signs = torch.randint(2, (spec.num_kv_heads, spec.head_dim), generator=case.generator()) * 2 - 1
    for q in sequences.q:
        q.copy_(signs.repeat_interleave(spec.group_size, dim=0))
    for v in sequences.v:
        v.copy_(_one_hot(*v.shape))
    places = max(len(_needle_places(n, spec.block_size)) for n in case.kv_lens)
    for turn in range(places):
        needles = []
        for k, kv_len in zip(sequences.k, case.kv_lens, strict=True):
            options = _needle_places(kv_len, spec.block_size)
            needles.append(options[turn % len(options)] if options else -1)
            k.zero_()
            if options:
                k[needles[-1]] = signs.to(k.dtype)

        def value_of_needle(
            s: int, position: int, head: int, needles: list[int] = needles
        ) -> Tensor | None:
            if not 0 <= needles[s] <= position:
                return None
            return sequences.v[s][needles[s], head // spec.group_size]

        scaled = Sequences(
            q=sequences.q, k=sequences.k, v=sequences.v, scale=_NEEDLE_SCORE / spec.head_dim
        )
        _judge(backend, case, scaled, value_of_needle)


def check_equal_keys_average_the_visible_values(backend: Subject, case: Case) -> None:
    """With all scores equal the output is the mean of exactly the visible values."""
    spec = attention_spec(case)
    sequences = random_sequences(case)
    for k in sequences.k:
        k.fill_(1.0)
    for v in sequences.v:
        v.copy_((torch.arange(len(v)) % _RAMP).view(-1, 1, 1).expand_as(v))

    def mean(s: int, position: int, head: int) -> Tensor | None:
        last = position if spec.causal else case.kv_lens[s] - 1
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        visible = [j % _RAMP for j in range(first, last + 1)]
        if not visible:
            return None
        return torch.full((spec.head_dim,), sum(visible) / len(visible))

    _judge(backend, case, sequences, mean)


def check_query_heads_read_their_kv_head(backend: Subject, case: Case) -> None:
    """Query head h reads KV head h // group_size."""
    spec = attention_spec(case)
    sequences = random_sequences(case)
    for v in sequences.v:
        v.copy_((1.0 + torch.arange(spec.num_kv_heads)).view(1, -1, 1).expand_as(v))

    def kv_head(s: int, position: int, head: int) -> Tensor | None:
        if position < 0 and spec.causal:
            return None
        return torch.full((spec.head_dim,), 1.0 + head // spec.group_size)

    _judge(backend, case, sequences, kv_head)


def check_large_scores_do_not_overflow(backend: Subject, case: Case) -> None:
    """Scores are summed in fp32: keys of 256 and 254 against a query of 256 leave fp16's range."""
    spec = attention_spec(case)
    sequences = random_sequences(case)
    for q in sequences.q:
        q.fill_(256.0)
    for k in sequences.k:
        k.fill_(254.0)
        k[-1:] = 256.0

    def last_value(s: int, position: int, head: int) -> Tensor | None:
        if position != case.kv_lens[s] - 1:
            return None
        return sequences.v[s][-1, head // spec.group_size]

    unscaled = Sequences(q=sequences.q, k=sequences.k, v=sequences.v, scale=1.0)
    _judge(backend, case, unscaled, last_value)


def _needle_places(kv_len: int, block_size: int) -> list[int]:
    """First and last token, and the tokens on either side of block edges, where splits end too."""
    edges = range(block_size, kv_len, block_size)
    spread = {*edges[:: -(-len(edges) // _MAX_EDGES) or 1], *edges[-1:]}
    places = {0, kv_len - 1, *spread, *(edge - 1 for edge in spread)}
    return sorted(place for place in places if 0 <= place < kv_len)


def _one_hot(kv_len: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Values that name their token and KV head: one channel each, of a size that grows."""
    values = torch.zeros(kv_len, num_kv_heads, head_dim)
    for token in range(kv_len):
        for head in range(num_kv_heads):
            values[token, head, (token + 3 * head) % head_dim] = 1 + token // head_dim
    return values


def _judge(
    backend: Subject,
    case: Case,
    sequences: Sequences,
    wanted: Callable[[int, int, int], Tensor | None],
) -> None:
    """Run, and compare the rows for which `wanted(sequence, position, head)` knows the answer."""
    call = attention_call(case, sequences, backend.torch_device)
    backend.run(call)
    out = call["out"].cpu().double()
    token = 0
    for s, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            for head in range(out.shape[1]) if kv_len else ():
                exact = wanted(s, position, head)
                if exact is not None:
                    what = f"sequence {s}, position {position}, head {head}"
                    limit = tolerance.needle_limit(case.spec.dtype, kv_len)
                    limit *= exact.abs().max().item()
                    within(what, out[token, head], exact.double(), limit, "must be exact")
            token += 1


def _sees_all(case: Case) -> bool:
    """Causal, uncapped and without a window: a needle anywhere behind the query is seen."""
    spec = attention_spec(case)
    return spec.causal and spec.window is None and spec.softcap is None


_BOTH = ("attention_decode", "attention_prefill")

CHECKS = (
    Check(run=check_needle_is_found, ops=_BOTH, applies=_sees_all),
    Check(run=check_equal_keys_average_the_visible_values, ops=_BOTH),
    Check(run=check_query_heads_read_their_kv_head, ops=_BOTH),
    Check(run=check_large_scores_do_not_overflow, ops=_BOTH, applies=_sees_all),
)
