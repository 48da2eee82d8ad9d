"""The workspace of flash decoding: the plan of a step, and partial results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tvr.backends.pycuda_raw.decode_shape import DecodeShape
from tvr.contract import AttentionDecodeSpec, Bounds

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 256
_SEGMENT_INTS = 8  # Segment in decode_work.cuh
_BLOCK_INTS = 4 + _SEGMENT_INTS  # BlockWork

#: Splits of a batch-invariant plan: enough of them to fill a GPU with one long sequence, and not
#: so short that merging them costs more than reading them.
_INVARIANT_SPLITS = 16
_INVARIANT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How sequences are cut.

    Attributes:
        max_splits: most splits of a sequence, each of a size that follows from the sequence's
            length alone; 0: all keys of a step are cut into equal runs, one a block.
        min_split_tiles: fewest tiles of such a split.
    """

    max_splits: int
    min_split_tiles: int

    @property
    def fixed(self) -> bool:
        """Whether the cuts in a sequence do not depend on its neighbours."""
        return self.max_splits > 0

    def splits_within(self, num_tiles: int) -> int:
        """Return the most splits of a sequence of up to so many tiles."""
        return min(self.max_splits, -(-num_tiles // self.min_split_tiles))


def split_rule(spec: AttentionDecodeSpec, shape: DecodeShape) -> SplitRule:
    """Return how a spec wants sequences cut."""
    if spec.max_splits is not None:
        return SplitRule(max_splits=min(spec.max_splits, _INVARIANT_SPLITS), min_split_tiles=1)
    if spec.batch_invariant:
        return SplitRule(
            max_splits=_INVARIANT_SPLITS, min_split_tiles=_INVARIANT_TOKENS // shape.tile_tokens
        )
    return SplitRule(max_splits=0, min_split_tiles=1)


class Layout:
    """Where things lie in the workspace.

    Args:
        spec: of the op.
        shape: of its kernels.
        num_blocks: blocks of the split kernel.
        bounds: the largest step.
    """

    def __init__(
        self, spec: AttentionDecodeSpec, shape: DecodeShape, num_blocks: int, bounds: Bounds
    ) -> None:
        rule = split_rule(spec, shape)
        num_seqs = bounds.max_num_seqs
        num_pairs = num_seqs * shape.num_bundles
        if rule.fixed:
            num_tiles = -(-bounds.max_seq_len // shape.tile_tokens)
            num_segments = num_slots = num_pairs * rule.splits_within(num_tiles)
        else:
            # A block shares at most the first and the last of its pairs with others.
            num_segments, num_slots = num_pairs + num_blocks, 2 * num_blocks
        self._items = {
            "blocks": num_blocks * _BLOCK_INTS,
            "segments": num_segments * _SEGMENT_INTS,
            "empty_seqs": num_seqs,
            "starts": num_seqs + 1,
            "ranks": num_seqs,
            "counters": num_slots,
            "partial_scales": num_slots * shape.bundle_size * 2,
            "partial_o": num_slots * shape.bundle_size * spec.head_dim,
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
