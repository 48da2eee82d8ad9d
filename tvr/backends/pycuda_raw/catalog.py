"""Which kernels to compile ahead: those that the ops load when a usual model binds them.

There is no list to keep: the ops are bound on a device that only notes what they load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvr.backends.pycuda_raw.build import Job
from tvr.backends.pycuda_raw.launch import Dim3, RawKernel
from tvr.backends.pycuda_raw.plugin import FUSED_ROWS, SMALL_BATCH_ROWS, bind
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import (
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    FusedLinearSpec,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SiluMulSpec,
)

#: Hidden and intermediate sizes of models people run, one for each way that a product of one row
#: cuts its rows: SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B and Llama-2-13B.
HIDDEN_SIZES = ((576, 1536), (2048, 8192), (4096, 14336), (5120, 13824))

#: Query heads that share a KV head, in the models people run.
GROUP_SIZES = (1, 4, 8, 16)


@dataclass
class NotingGpu:
    """A `launch.Gpu` that notes the kernels it is asked to load, and has none.

    Attributes:
        loaded: in the order they were first asked for.
    """

    sm: int
    name: str = "cuda:0"
    num_sms: int = 132
    max_shared_bytes: int = 0
    loaded: dict[KernelVariant, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.max_shared_bytes = max_shared_bytes(self.sm)

    def load(self, variant: KernelVariant, params: str, shared_bytes: int) -> RawKernel:
        """Note `variant` and return a kernel that must not be launched."""
        self.loaded[variant] = None
        return _refuse


def standard_jobs(sm: int, dtypes: Sequence[str], head_dims: Sequence[int]) -> list[Job]:
    """Return what the ops need on an architecture, each kernel once, with the ops that load it."""
    ops: dict[KernelVariant, dict[str, None]] = {}
    for spec in _specs(dtypes, head_dims):
        gpu = NotingGpu(sm)
        bind(spec, gpu)
        for variant in gpu.loaded:
            ops.setdefault(variant, {})[spec.op] = None
    return [Job(variant, sm, tuple(names)) for variant, names in ops.items()]


def max_shared_bytes(sm: int) -> int:
    """Return the most dynamic shared memory of a block (CUDA programming guide, compute
    capabilities)."""
    kib = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}.get(sm, 99)
    return kib * 1024


def _specs(dtypes: Sequence[str], head_dims: Sequence[int]) -> Iterator[OpSpec]:
    """Yield specs of every op; attention first, whose kernels take longest to compile."""
    for dtype in dtypes:
        for head_dim in head_dims:
            for group_size in GROUP_SIZES:
                heads: dict[str, Any] = {
                    "dtype": dtype,
                    "num_heads": 8 * group_size,
                    "num_kv_heads": 8,
                    "head_dim": head_dim,
                }
                paged = {**heads, "block_size": 16}
                yield AttentionPrefillSpec(**paged)
                yield AttentionDecodeSpec(**paged)
                yield AttentionDecodeSpec(**paged, batch_invariant=True)
                yield AttentionDecodeSpec(**paged, max_splits=1)
            del paged["num_heads"]
            yield RopeKvWriteSpec(**heads, block_size=16)
            yield RopeSpec(**heads)
            yield KvWriteSpec(**paged)
        for hidden, intermediate in HIDDEN_SIZES:
            yield from _products(dtype, hidden, intermediate)
        yield AddRmsNormSpec(dtype=dtype, hidden_size=2048)
        yield RmsNormSpec(dtype=dtype, hidden_size=2048)
        yield SiluMulSpec(dtype=dtype, intermediate_size=8192)
        yield ArgmaxSpec(dtype=dtype, vocab_size=128256)


def _products(dtype: str, hidden: int, intermediate: int) -> Iterator[OpSpec]:
    """Yield the products of a layer: of a few rows, and of one with what is fused with it."""
    square: dict[str, Any] = {"dtype": dtype, "in_features": hidden, "out_features": hidden}
    yield LinearSpec(**square, max_rows=SMALL_BATCH_ROWS)
    yield FusedLinearSpec(**square, max_rows=FUSED_ROWS, rms_norm=True)
    yield FusedLinearSpec(**square, max_rows=FUSED_ROWS, rms_norm=True, silu_mul=True)
    down = {**square, "in_features": intermediate}
    yield FusedLinearSpec(**down, max_rows=FUSED_ROWS, add=True)


def _refuse(grid: Dim3, block: Dim3, shared_bytes: int, packed: bytes) -> None:
    raise AssertionError("a kernel that was only noted cannot be launched")
