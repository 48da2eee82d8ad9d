"""Cases of the same spec with other sizes: the steps that one graph or one workspace must serve."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tvr.conformance.binding import ROWS_ARE_SEQUENCES
from tvr.conformance.frame import Room
from tvr.contract import AttentionDecodeSpec, AttentionSpec, Bounds, LinearSpec

if TYPE_CHECKING:
    from tvr.conformance.case import Case

_SPARE = 2  # rows and sequences beyond the largest step, so that there is always padding
_FREE_BLOCKS = 8  # a case's pool has some that no sequence owns
_LONG = 130  # tokens: several splits, and still a small case
_MOST_KEYS = 1 << 16  # in a step that is made to be long
#: Where a backend may change the number of splits or tiles: multiples of these.
_TILES = (16, 32, 64, 128, 256, 512, 1024)
_CHUNKS = (1, 3, 16, 17, 2)  # new tokens of a prefill, in turn


def fewer_rows(case: Case) -> list[Case]:
    """Return the case with its first sequence or row only, and with half of them."""
    num_rows = len(case.kv_lens) or case.num_tokens
    sizes = sorted({1, num_rows // 2} - {0, num_rows})
    if isinstance(case.spec, AttentionSpec):
        return [replace(case, q_lens=case.q_lens[:n], kv_lens=case.kv_lens[:n]) for n in sizes]
    return [replace(case, num_tokens=n) for n in sizes]


def longest_everywhere(case: Case) -> Case:
    """Return the case with its sequences as long as the longest, and long enough to be split.

    Where that would be too much, the first of them are.
    """
    if not isinstance(case.spec, AttentionSpec):
        return case
    longest = longest_in(case)
    num_long = min(len(case.kv_lens), max(1, _MOST_KEYS // longest))
    return replace(case, kv_lens=(longest,) * num_long + case.kv_lens[num_long:])


def longest_in(case: Case) -> int:
    """Return the most keys that steps made from an attention case have in one sequence."""
    return max(_LONG, *case.kv_lens)


def turned(case: Case) -> Case:
    """Return the case with its sequences in another order: the first comes last."""
    q_lens, kv_lens = ((*lens[1:], *lens[:1]) for lens in (case.q_lens, case.kv_lens))
    return replace(case, q_lens=q_lens, kv_lens=kv_lens)


def length_sweep(case: Case) -> list[Case]:
    """Return steps of the case's batch size with lengths 0, 1, around every edge, and the most."""
    assert isinstance(case.spec, AttentionSpec)
    longest, batch = longest_in(case), len(case.kv_lens)
    edges = {n + d for n in (case.spec.block_size, *_TILES) for d in (-1, 0, 1)}
    lens = sorted(n for n in edges | {0, 1, longest - 1, longest} if 0 <= n <= longest)
    lens += itertools.islice(itertools.cycle(lens), -len(lens) % batch)
    steps = [_with_lens(case, lens[i : i + batch]) for i in range(0, len(lens), batch)]
    # From long to short too: what a long step left must not reach a short one.
    return [*steps, longest_everywhere(case), steps[0]]


def room_for(steps: Sequence[Case]) -> Room:
    """Return room for each of the steps, all of one spec, and a little more."""
    spec = steps[0].spec
    if isinstance(spec, AttentionSpec):
        num_seqs = max(len(step.kv_lens) for step in steps) + _SPARE
        num_tokens = max(sum(step.q_lens) for step in steps) + _SPARE
        if isinstance(spec, AttentionDecodeSpec):
            num_tokens = num_seqs * spec.max_q_len
        bounds = Bounds(
            max_num_seqs=num_seqs,
            max_num_tokens=num_tokens,
            max_seq_len=max(1, *(n for step in steps for n in step.kv_lens)),
            max_q_len=max(1, *(n for step in steps for n in step.q_lens)),
        )
        keys_of = [step.kv_lens for step in steps]
    else:
        rows = max(step.num_tokens for step in steps) + _SPARE
        if isinstance(spec, LinearSpec) and spec.max_rows is not None:
            rows = min(rows, spec.max_rows)
        bounds = Bounds(max_num_seqs=1, max_num_tokens=rows, max_seq_len=rows, max_q_len=rows)
        if spec.op in ROWS_ARE_SEQUENCES:
            bounds = replace(bounds, max_num_seqs=rows, max_q_len=1)
        keys_of = [(rows,)]
    block_size: int = getattr(spec, "block_size", 1)
    used = max(sum(-(-n // block_size) for n in kv_lens) for kv_lens in keys_of)
    return Room(bounds=bounds, num_blocks=used + _FREE_BLOCKS)


def _with_lens(case: Case, kv_lens: Sequence[int]) -> Case:
    if isinstance(case.spec, AttentionDecodeSpec):
        return replace(case, kv_lens=tuple(kv_lens))
    chunks = [_CHUNKS[s % len(_CHUNKS)] for s in range(len(kv_lens))]
    return replace(case, kv_lens=tuple(kv_lens), q_lens=tuple(map(min, chunks, kv_lens)))
