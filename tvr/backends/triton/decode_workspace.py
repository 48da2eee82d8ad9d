"""The workspace of flash decoding: the plan of a step, and partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tvr.backends.triton.decode_kernels import BUNDLE
from tvr.contract import AttentionDecodeSpec, Bounds

_ALIGNMENT = 256

#: Splits of a batch-invariant plan: enough of them to fill a GPU with one long sequence, and not
#: so short that merging them costs more than reading them.
_INVARIANT_SPLITS = 16
_INVARIANT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How sequences are cut.

    Attributes:
        max_splits: most splits of a sequence, each of a size that follows from the sequence's
            length alone; 0: all keys of a step are cut into equal runs, one a program.
        min_split_tiles: fewest tiles of such a split.
    """

    max_splits: int
    min_split_tiles: int

    @property
    def fixed(self) -> bool:
        """Whether the cuts in a sequence do not depend on its neighbours."""
        return self.max_splits > 0


def split_rule(spec: AttentionDecodeSpec, tile: int) -> SplitRule:
    """Return how a spec wants sequences cut into tiles of so many tokens, and these shared out."""
    if spec.max_splits is not None:
        return SplitRule(max_splits=min(spec.max_splits, _INVARIANT_SPLITS), min_split_tiles=1)
    if spec.batch_invariant:
        min_split_tiles = max(1, _INVARIANT_TOKENS // tile)
        return SplitRule(max_splits=_INVARIANT_SPLITS, min_split_tiles=min_split_tiles)
    return SplitRule(max_splits=0, min_split_tiles=1)


def num_parts(spec: AttentionDecodeSpec) -> int:
    """Return the bundles of a KV head."""
    return -(-spec.group_size // BUNDLE)


def num_rows_of(spec: AttentionDecodeSpec) -> int:
    """Return the rows of a bundle's partial result: its query heads, up to a power of two."""
    return int(triton.next_power_of_2(min(spec.group_size, BUNDLE)))


class Layout:
    """Where things lie in the workspace.

    Args:
        spec: of the op.
        tile: tokens of a tile.
        num_programs: programs of the split kernel.
        bounds: the largest step.
    """

    def __init__(
        self, spec: AttentionDecodeSpec, tile: int, num_programs: int, bounds: Bounds
    ) -> None:
        rule = split_rule(spec, tile)
        num_slots = 2 * num_programs
        if rule.fixed:
            num_tiles = -(-bounds.max_seq_len // tile)
            num_splits = min(rule.max_splits, -(-num_tiles // rule.min_split_tiles))
            num_pairs = bounds.max_num_seqs * spec.num_kv_heads * num_parts(spec)
            num_slots = num_pairs * max(num_splits, 1)
        num_rows = num_slots * num_rows_of(spec)
        self._items = {
            "starts": bounds.max_num_seqs + 1,
            "leads": 6 * num_programs,
            "share_and_total": 2,
            "counters": num_slots,
            "partial_mass": 2 * num_rows,
            "partial_o": num_rows * spec.head_dim,
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return sum(_padded(n) for n in self._items.values())

    def parts(self, workspace: Tensor) -> dict[str, Tensor]:
        """Return the parts of a workspace [num_bytes] uint8, int32 or fp32, by name."""
        parts, start = {}, 0
        for name, n in self._items.items():
            dtype = torch.float32 if name.startswith("partial") else torch.int32
            parts[name] = workspace[start : start + 4 * n].view(dtype)
            start += _padded(n)
        return parts


def _padded(num_items: int) -> int:
    """Return the bytes of 4-byte items, up to the next multiple of the alignment."""
    return -(-4 * num_items // _ALIGNMENT) * _ALIGNMENT
