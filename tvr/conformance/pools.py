"""Pools too large to fill: block ids and offsets of more bits than a kernel may give them.

Only the block in use, and the one that a shortened number would name instead, are ever touched: on
a CPU the rest costs no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from tvr.conformance.tensors import torch_dtype
from tvr.contract import AttentionSpec, KvWriteSpec, RopeKvWriteSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

PagedSpec: TypeAlias = AttentionSpec | KvWriteSpec | RopeKvWriteSpec

#: The first block id that 16 bits cut to 0.
FAR_BLOCK = 2**16
_LARGEST_FAR_POOLS = 2**29  # bytes of K and V together

#: With so many elements from block to block, which fit 31 bits, 32 bits cut the offset of block 4
#: to 0.
WIDE_BLOCK = 4
_WIDE_STRIDE = 2**30


def far_pools(spec: PagedSpec, device: torch.device) -> list[Tensor]:
    """Return K and V pools whose last block is `FAR_BLOCK`; nothing is filled."""
    shape = (FAR_BLOCK + 1, *_block_shape(spec))
    return [torch.empty(shape, dtype=_kv_dtype(spec), device=device) for _ in range(2)]


def wide_pools(spec: PagedSpec, device: torch.device) -> list[Tensor]:
    """Return K and V pools whose last block, `WIDE_BLOCK`, lies behind 2^32 elements."""
    shape = _block_shape(spec)
    block = shape.numel()
    size = WIDE_BLOCK * _WIDE_STRIDE + 2 * block  # K and V of a block side by side
    memory = torch.empty(size, dtype=_kv_dtype(spec), device=device)
    strides = (_WIDE_STRIDE, block // shape[0], shape[2], 1)
    return [memory.as_strided((WIDE_BLOCK + 1, *shape), strides, at) for at in (0, block)]


def fits_far_pools(case: Case) -> bool:
    """Whether a case is for more than an interpreter, lies in one block, and this is small."""
    if case.level == "smoke" or not isinstance(case.spec, PagedSpec):
        return False
    num_bytes = 2 * FAR_BLOCK * _block_shape(case.spec).numel() * _kv_dtype(case.spec).itemsize
    lens = case.kv_lens or (case.num_tokens,)
    return len(lens) == 1 and lens[0] <= case.spec.block_size and num_bytes <= _LARGEST_FAR_POOLS


def fits_wide_pools(case: Case) -> bool:
    """Whether a case also is of the full level, and of 16 bits."""
    if not fits_far_pools(case) or case.level != "full":
        return False
    assert isinstance(case.spec, PagedSpec)
    return _kv_dtype(case.spec).itemsize == 2


def no_room_for_wide_pools(backend: Subject, case: Case) -> list[str]:
    """Return that a GPU lacks the memory; empty: it does not, or the device is a CPU."""
    if backend.device.type != "cuda":
        return []
    needed = 2 * WIDE_BLOCK * _WIDE_STRIDE
    free, _ = torch.cuda.mem_get_info(backend.torch_device)
    if free > needed + _LARGEST_FAR_POOLS:
        return []
    return [f"needs {needed >> 30} GiB of memory on {backend.device}; {free >> 30} GiB are free"]


def _block_shape(spec: PagedSpec) -> torch.Size:
    return torch.Size((spec.num_kv_heads, spec.block_size, spec.head_dim))


def _kv_dtype(spec: PagedSpec) -> torch.dtype:
    return torch_dtype(spec.kv_dtype or spec.dtype)
