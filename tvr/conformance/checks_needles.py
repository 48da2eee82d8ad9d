"""Claims about which keys attention sees and which head reads which.

Noise finds rounding bugs; these inputs find indexing bugs. Every answer is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.attending import BOTH, is_causal, rows_of, run
from tvr.conformance.judge import within
from tvr.conformance.ledger import Check
from tvr.conformance.sequences import Sequences, attention_spec, random_sequences

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject
    from tvr.contract import AttentionSpec

# (sequence, positions [q_len] of its rows) -> which rows are known, [q_len, H] or [q_len, 1], and
# what they must be, [q_len, H, D] or broadcast to it
Answers = Callable[[int, "Tensor"], tuple["Tensor", "Tensor"]]

_NEEDLE_SCORE = 40.0  # every other key scores 0: exp(-40) is below fp32's eps
_RAMP = 64  # values repeat after so many tokens, to be exact in bf16
_MAX_EDGES = 8  # block edges tried in one sequence, evenly spread
_SMALLEST_TILE = 16
_LATE = 2**16  # from here on values count, in a long context


def check_needle_is_found(backend: Subject, case: Case) -> None:
    """One key aligned with the query outweighs all others: at both ends and at every edge."""
    spec = attention_spec(case)
    sequences = replace(random_sequences(case), scale=_NEEDLE_SCORE / spec.head_dim)
    # Signs of a KV head's needle, shared by the query heads that read it.
    signs = torch.randint(2, (spec.num_kv_heads, spec.head_dim), generator=case.generator()) * 2 - 1
    for q in sequences.q:
        q.copy_(_per_query_head(spec, signs))
    for v in sequences.v:
        v.copy_(_one_hot(*v.shape))
    heads = torch.arange(spec.num_kv_heads)
    places = [torch.tensor(_needle_places(n, spec.block_size)) for n in case.kv_lens]
    # Each KV head has a needle of its own, to try as many places in one call.
    for turn in range(0, max(map(len, places)), spec.num_kv_heads):
        needles = [p[(turn + heads) % len(p)] if len(p) else None for p in places]
        for k, needle in zip(sequences.k, needles, strict=True):
            k.zero_()
            if needle is not None:
                k[needle, heads] = signs.to(k.dtype)

        def values_of_needles(
            s: int, positions: Tensor, needles: list[Tensor | None] = needles
        ) -> tuple[Tensor, Tensor]:
            needle = needles[s]
            assert needle is not None, "a sequence without keys is not judged"
            seen = positions.view(-1, 1) >= needle.repeat_interleave(spec.group_size)
            return seen, _per_query_head(spec, sequences.v[s][needle, heads])

        def places_of_needles(s: int, needles: list[Tensor | None] = needles) -> str:
            needle = needles[s]
            return "" if needle is None else f", needles at {needle.tolist()}"

        _judge(backend, case, sequences, values_of_needles, places_of_needles)


def check_equal_keys_average_the_visible_values(backend: Subject, case: Case) -> None:
    """With all scores equal the output is the mean of exactly the visible values."""
    values = [1.0 + torch.arange(n) % _RAMP for n in case.kv_lens]
    _judge_means(backend, case, values)


def check_late_values_of_a_long_context_count(backend: Subject, case: Case) -> None:
    """Values 0 for 65,536 tokens and 1 from there on: of 131,072 the mean is a half."""
    values = [(torch.arange(n) >= _LATE).float() for n in case.kv_lens]
    _judge_means(backend, case, values)


def check_query_heads_read_their_kv_head(backend: Subject, case: Case) -> None:
    """Query head h reads KV head h // group_size."""
    spec = attention_spec(case)
    sequences = random_sequences(case)
    heads = (1.0 + torch.arange(spec.num_kv_heads)).view(-1, 1).expand(-1, spec.head_dim)
    for v in sequences.v:
        v.copy_(heads)

    def kv_head(s: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        known = positions >= 0 if spec.causal else torch.full_like(positions >= 0, True)
        return known.view(-1, 1), _per_query_head(spec, heads)

    _judge(backend, case, sequences, kv_head)


def check_one_key_gives_its_value(backend: Subject, case: Case) -> None:
    """A row that sees one key gives that key's value as it is, whatever the score."""
    spec = attention_spec(case)
    sequences = random_sequences(case)

    def first_value(s: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        return positions.view(-1, 1) == 0, _per_query_head(spec, sequences.v[s][0])

    _judge(backend, case, sequences, first_value)


def check_large_scores_do_not_overflow(backend: Subject, case: Case) -> None:
    """Scores are summed in fp32: keys of 256 and 254 against a query of 256 leave fp16's range."""
    spec = attention_spec(case)
    sequences = replace(random_sequences(case), scale=1.0)
    for q in sequences.q:
        q.fill_(256.0)
    for k in sequences.k:
        k.fill_(254.0)
        k[-1:] = 256.0

    def last_value(s: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        is_last = positions.view(-1, 1) == case.kv_lens[s] - 1
        return is_last, _per_query_head(spec, sequences.v[s][-1])

    _judge(backend, case, sequences, last_value)


def _judge_means(backend: Subject, case: Case, values: list[Tensor]) -> None:
    """Judge with equal keys and values[s][j] in every channel of token j of sequence s."""
    spec = attention_spec(case)
    sequences = random_sequences(case)
    for k, v, value in zip(sequences.k, sequences.v, values, strict=True):
        k.fill_(1.0)
        v.copy_(value.view(-1, 1, 1).expand_as(v))

    def mean(s: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        behind = positions + 1 if spec.causal else torch.full_like(positions, case.kv_lens[s])
        first = 0 * positions if spec.window is None else positions + 1 - spec.window
        behind, first = behind.clamp_min(0), first.clamp_min(0)
        sums = torch.cat([torch.zeros(1), values[s]]).double().cumsum(0)  # of what stands before
        means = (sums[behind] - sums[first]) / (behind - first)
        return (behind > first).view(-1, 1), means.view(-1, 1, 1)

    _judge(backend, case, sequences, mean)


def _needle_places(kv_len: int, block_size: int) -> list[int]:
    """First and last token, and those on either side of block edges and powers of two.

    Tiles and splits of keys end at block edges and, often, at powers of two.
    """
    edges = range(block_size, kv_len, block_size)
    spread = {*edges[:: -(-len(edges) // _MAX_EDGES) or 1], *edges[-1:]}
    spread |= {1 << i for i in range(kv_len.bit_length()) if 1 << i >= _SMALLEST_TILE}
    places = {0, kv_len - 1, *spread, *(edge - 1 for edge in spread)}
    return sorted(place for place in places if 0 <= place < kv_len)


def _one_hot(kv_len: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Values that name their token and KV head: one channel each, of a size that grows."""
    values = torch.zeros(kv_len, num_kv_heads, head_dim)
    token, head = torch.arange(kv_len).view(-1, 1), torch.arange(num_kv_heads)
    channel = (token + 3 * head) % head_dim  # [kv_len, KVH]
    size = (1.0 + token // head_dim).expand_as(channel)
    return values.scatter_(2, channel.unsqueeze(2), size.unsqueeze(2))


def _per_query_head(spec: AttentionSpec, x: Tensor) -> Tensor:
    """Return x [KVH, D] as [H, D]."""
    return x.repeat_interleave(spec.group_size, dim=0)


def _judge(
    backend: Subject,
    case: Case,
    sequences: Sequences,
    answers: Answers,
    note: Callable[[int], str] = lambda s: "",
) -> None:
    """Run, and compare the rows and heads whose answer is known; `note(s)` tells of sequence s."""
    spec, out = attention_spec(case), run(backend, case, sequences)["out"].cpu().double()
    for s, rows in enumerate(rows_of(sequences)):
        kv_len = len(sequences.k[s])
        if kv_len == 0:
            continue
        positions = torch.arange(rows.start, rows.stop) - rows.stop + kv_len
        known, answer = answers(s, positions)
        known = known.unsqueeze(-1)
        exact = answer.double().where(known, 0.0).expand_as(out[rows])
        limit = tolerance.needle_limit(case.spec.dtype, kv_len)
        # The spacing of the numbers, where it stops shrinking with them.
        limits = torch.maximum(
            limit * exact.abs().amax(-1, keepdim=True), tolerance.ulp(exact, case.spec.dtype)
        )
        found = out[rows].where(known, 0.0)
        if case.spec.dtype == "float32" and not ((found - exact).abs() <= limits).all():
            # Sums of a thousand equal weights may all be off to the same side.
            plain = _plain(spec, sequences, s).where(known, 0.0)
            error = (plain - exact).abs().max().item()
            largest = tolerance.max_error_limit("float32", error, exact.abs().max().item())
            limits = limits.clamp_min(largest)
        what = f"sequence {s} of {kv_len} keys{note(s)}"
        within(what, found, exact, limits, "must be exact")


def _plain(spec: AttentionSpec, sequences: Sequences, s: int) -> Tensor:
    """Return what a plain program in the case's dtype makes of sequence s."""
    q, k, v = sequences.q[s], sequences.k[s], sequences.v[s]
    return oracle.low_precision_attention(spec, sequences.scale, q, k, v).double()


def _sees_all(case: Case) -> bool:
    """Causal, uncapped and without a window: a needle anywhere behind the query is seen."""
    spec = attention_spec(case)
    return spec.causal and spec.window is None and spec.softcap is None


def _has_first_row(case: Case) -> bool:
    """Whether a row stands at position 0, where it sees one key."""
    lens = zip(case.q_lens, case.kv_lens, strict=True)
    return is_causal(case) and any(q_len >= kv_len > 0 for q_len, kv_len in lens)


def _is_long(case: Case) -> bool:
    return max(case.kv_lens) > _LATE


CHECKS = (
    Check(run=check_needle_is_found, ops=BOTH, applies=_sees_all),
    Check(run=check_equal_keys_average_the_visible_values, ops=BOTH),
    Check(run=check_late_values_of_a_long_context_count, ops=BOTH, applies=_is_long),
    Check(run=check_query_heads_read_their_kv_head, ops=BOTH),
    Check(run=check_one_key_gives_its_value, ops=BOTH, applies=_has_first_row),
    Check(run=check_large_scores_do_not_overflow, ops=BOTH, applies=_sees_all),
)
