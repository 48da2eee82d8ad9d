"""Greedy choice of a token: a row is shared by as many blocks as keep the device busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, int32, int64, tensor
from tvr.backends.pycuda_raw.threads import PACK_SIZES
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import ArgmaxSpec, BoundOp, Bounds

if TYPE_CHECKING:
    from torch import Tensor

_THREADS = 256
_PACKS_OF_A_THREAD = 4  # in flight at once; a smaller part would not be ready sooner
_BLOCKS_OF_AN_SM = 8
_PARTIAL_BYTES, _COUNTER_BYTES = 8, 4


def argmax_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `argmax.cu`."""
    return (
        tensor("logits", dtype),
        tensor("out", "int64"),
        tensor("partials", "int64"),
        tensor("counters", "int32"),
        int64("row_stride"),
        *map(int32, ("vocab", "part_size")),
    )


def bind_argmax(spec: ArgmaxSpec, gpu: Gpu) -> BoundOp:
    kernel = Kernel(
        gpu,
        KernelVariant(source="argmax", dtype=spec.dtype),
        argmax_params(spec.dtype),
        block=_THREADS,
    )
    pack = PACK_SIZES[spec.dtype]
    vocab, smallest_part = spec.vocab_size, _THREADS * _PACKS_OF_A_THREAD * pack
    most_blocks = gpu.num_sms * _BLOCKS_OF_AN_SM  # where rows are shared
    workspace: dict[str, Tensor] = {}

    def run(logits: Tensor, *, out: Tensor) -> Tensor:
        """out [T] int64: lowest id of the largest of logits [T, vocab]; -1 where a row has NaN."""
        rows = len(logits)
        parts = max(1, min(most_blocks // max(1, rows), -(-vocab // smallest_part)))
        part_size = -(-vocab // (parts * pack)) * pack
        parts = -(-vocab // part_size)  # rounded up to packs, fewer parts may do
        kernel(
            (rows, parts),
            logits,
            out,
            workspace["partials"],
            workspace["counters"],
            logits.stride(0),
            vocab,
            part_size,
        )
        return out

    def workspace_bytes(bounds: Bounds) -> int:
        """Return room for a key of each part and a counter of each row that is shared."""
        return most_blocks * (_PARTIAL_BYTES + _COUNTER_BYTES)

    def attach(tensor: Tensor) -> None:
        """Take a zeroed workspace: counters start at 0, where every run leaves them again.

        A launch that is refused counts nothing, and one that dies takes the context with it, so a
        `plan` that clears them would cost each step a launch and mend nothing.
        """
        ends = most_blocks * _PARTIAL_BYTES
        workspace["partials"] = tensor[:ends].view(torch.int64)
        workspace["counters"] = tensor[ends:].view(torch.int32)

    return BoundOp(run=run, workspace_bytes=workspace_bytes, attach=attach)
