"""What the decode kernels are compiled with for a spec, and how much shared memory they take."""

from __future__ import annotations

from dataclasses import dataclass

from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionDecodeSpec

#: Tokens of a slice: what a warp takes at a time.
SLICE = 16

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_TILE_HEADS = 8  # columns of a tensor-core tile
_STATE_PAD = 4  # floats behind a head's state
_SCALE_BYTES = 8  # maximum and sum of a state

#: What a multiprocessor has beyond the largest block, and keeps for each block.
_RESERVED_BYTES = 1024
_STATIC_BYTES = 128

#: (warps of a block, blocks of a multiprocessor, stages below which the next is taken): two blocks
#: hide each other's ends of segments, but too short a ring does not cover memory's latency.
_CHOICES = ((4, 2, 3), (4, 1, 2), (2, 1, 2), (1, 1, 2))
_MAX_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """The constants of a decode kernel.

    Attributes:
        warps: of a block.
        stages: slices in a warp's ring.
        ctas: blocks that a multiprocessor holds.
        group_tiles: tensor-core tiles for the query heads of a bundle.
        bundle_size: most query heads of a bundle.
        num_kv_heads, num_parts: there are num_parts bundles for each KV head.
        shared_bytes: dynamic shared memory of a block.
        state_bytes: the part of it that is not rings; all that the combine needs.
    """

    warps: int
    stages: int
    ctas: int
    group_tiles: int
    bundle_size: int
    num_kv_heads: int
    num_parts: int
    shared_bytes: int
    state_bytes: int

    @property
    def tile_tokens(self) -> int:
        """Tokens that a block takes at a time."""
        return self.warps * SLICE

    @property
    def num_bundles(self) -> int:
        """Bundles of all KV heads."""
        return self.num_kv_heads * self.num_parts

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps


def decode_shape(spec: AttentionDecodeSpec, max_shared_bytes: int) -> DecodeShape:
    """Return the constants for a device whose blocks have at most so much shared memory."""
    item_bytes = ITEM_BYTES[spec.dtype]
    # Two tiles hold 16 heads, if the registers of a thread do: they hold O and Q.
    wide = spec.group_size > _TILE_HEADS and item_bytes == 2 and spec.head_dim <= 128
    group_tiles = 2 if wide else 1
    bundle_size = min(spec.group_size, _TILE_HEADS * group_tiles)
    query_bytes = _TILE_HEADS * spec.head_dim * 4 if item_bytes == 4 else 0
    for warps, ctas, min_stages in _CHOICES:
        room = (max_shared_bytes + _RESERVED_BYTES) // ctas - _RESERVED_BYTES - _STATIC_BYTES
        stage_bytes = warps * 2 * SLICE * spec.head_dim * item_bytes
        row_bytes = (spec.head_dim + _STATE_PAD) * 4 + _SCALE_BYTES
        # Room for full bundles: models with other groups then share a kernel.
        full_bytes = warps * _TILE_HEADS * group_tiles * row_bytes + query_bytes
        stages = min(_MAX_STAGES, (room - full_bytes) // stage_bytes)
        if stages >= min_stages:
            break
    state_bytes = warps * bundle_size * row_bytes + query_bytes
    assert stages >= 2, f"{max_shared_bytes} bytes of shared memory are less than any GPU has"
    return DecodeShape(
        warps=warps,
        stages=stages,
        ctas=ctas,
        group_tiles=group_tiles,
        bundle_size=bundle_size,
        num_kv_heads=spec.num_kv_heads,
        num_parts=-(-spec.group_size // bundle_size),
        shared_bytes=stages * stage_bytes + state_bytes,
        state_bytes=state_bytes,
    )


def plan_variant(spec: AttentionDecodeSpec) -> KernelVariant:
    """Return the kernel that cuts a step into shares."""
    return KernelVariant(source="fd_plan", dtype=spec.dtype)


def decode_variant(source: str, spec: AttentionDecodeSpec, shape: DecodeShape) -> KernelVariant:
    """Return `fd_split`, `fd_combine` or `paged_attention` for a spec and its shape."""
    return KernelVariant(
        source=source,
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        defines=(
            ("WARPS", shape.warps),
            ("STAGES", shape.stages),
            ("GROUP_TILES", shape.group_tiles),
            ("CTAS", shape.ctas),
        ),
    )
