"""Measures cells: all backends in turn, so that a drift of the device meets all alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tvr.bench.attention_inputs import attention_calls
from tvr.bench.cells import AttentionCell, Cell
from tvr.bench.op_inputs import op_calls
from tvr.bench.rows import measured, not_measured
from tvr.conformance.ledger import CheckFailed

if TYPE_CHECKING:
    from tvr.bench.buffers import Buffers
    from tvr.bench.gate import Gate
    from tvr.bench.peer import Entry, Peer

Key = TypeVar("Key", bound=Hashable)

#: Turns of each backend at a cell, and the measurements of a turn.
ROUNDS, SAMPLES_OF_A_ROUND = 5, 5

#: Sets of inputs, at most: cells too small to outgrow the L2 cache with so many stay in it.
MOST_SETS = 1024


def compare(
    cells: Iterable[Cell], peers: Sequence[Peer], gate: Gate, buffers: Buffers, l2_bytes: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each cell, one for each peer, in their order.

    What a peer cannot do is in its row, and the others go on.
    """
    for cell in cells:
        rows = {p.name: _skipped(p, cell) for p in peers if p.subject.why_not(cell.spec)}
        asked = [peer for peer in peers if peer.name not in rows]
        if asked:
            rows |= _compare_one(cell, asked, gate, buffers, l2_bytes)
        yield [rows[peer.name] for peer in peers]


def num_sets(num_bytes: int, l2_bytes: int) -> int:
    """Return how many sets of inputs make one that is read again be read from memory.

    Between two reads of a set, three times the L2 cache of other memory is touched.
    """
    return max(2, min(MOST_SETS, -(-3 * l2_bytes // num_bytes) + 1))


def _compare_one(
    cell: Cell, peers: Sequence[Peer], gate: Gate, buffers: Buffers, l2_bytes: int
) -> dict[str, dict[str, Any]]:
    """Return the row of each peer at a cell."""
    sets = num_sets(cell.num_bytes, l2_bytes)
    rows: dict[str, dict[str, Any]] = {}
    entries: dict[str, Entry] = {}
    try:
        if isinstance(cell, AttentionCell):
            calls = attention_calls(cell, buffers, sets)
        else:
            calls = op_calls(cell, buffers, sets)
    except Exception as error:
        return {peer.name: not_measured(cell, peer.name, error=says(error)) for peer in peers}
    for peer in peers:
        try:
            entries[peer.name] = peer.enter(calls, gate)
        except (Exception, SystemExit) as error:
            rows[peer.name] = not_measured(cell, peer.name, error=says(error))
    failed = take_turns(entries)
    for name, entry in entries.items():
        if name in failed:
            rows[name] = not_measured(cell, name, error=failed[name])
        else:
            rows[name] = measured(cell, name, entry, sets)
    return rows


def take_turns(entries: Mapping[Key, Entry]) -> dict[Key, str]:
    """Take the samples of all entries in turn; return why some failed, and had no more turns."""
    failed: dict[Key, str] = {}
    for _ in range(ROUNDS):
        for key, entry in entries.items():
            if key in failed:
                continue
            try:
                entry.samples += entry.timer.sample(SAMPLES_OF_A_ROUND)
            except (Exception, SystemExit) as error:
                failed[key] = says(error)
    return failed


def _skipped(peer: Peer, cell: Cell) -> dict[str, Any]:
    return not_measured(cell, peer.name, skipped="; ".join(peer.subject.why_not(cell.spec)))


def says(error: BaseException) -> str:
    """Return what went wrong in one line, for a row."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text:
        return f"out of memory: {text}"
    return text if isinstance(error, CheckFailed) else f"{type(error).__name__}: {text}"
