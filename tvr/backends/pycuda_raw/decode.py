"""Attention of one new token a sequence over the paged cache: flash decoding, or one pass."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw.decode_shape import (
    ITEM_BYTES,
    decode_shape,
    decode_variant,
    plan_variant,
)
from tvr.backends.pycuda_raw.decode_workspace import Layout, split_rule
from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, float32, int32, int64, tensor
from tvr.contract import AttentionDecodeSpec, BoundOp, Bounds, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

_PLAN_THREADS = 1024
_QUAD = 4  # channels that a thread writes at once: QUAD in partials.cuh

PLAN_PARAMS = (
    tensor("seq_lens", "int32"),
    tensor("blocks", "int32"),
    tensor("segments", "int32"),
    tensor("empty_seqs", "int32"),
    tensor("starts", "int32"),
    tensor("ranks", "int32"),
    tensor("counters", "int32", optional=True),
    *map(int32, ("num_seqs", "num_bundles", "num_parts", "num_blocks", "tile_tokens")),
    *map(int32, ("max_splits", "min_split_tiles")),
)


def _inputs(dtype: str) -> tuple[Param, ...]:
    return (
        tensor("q", dtype),
        tensor("k_cache", dtype, inner=3),
        tensor("v_cache", dtype, inner=3),
        tensor("block_table", "int32"),
    )


def _outputs(dtype: str) -> tuple[Param, ...]:
    return (
        tensor("out", dtype, inner=3, alignment=_QUAD * ITEM_BYTES[dtype]),
        tensor("lse", "float32", optional=True, inner=2),
    )


_SIZES = (
    *map(int64, ("q_seq_stride", "q_head_stride", "k_block_stride", "v_block_stride")),
    int64("table_stride"),
    float32("scale_log2"),
    *map(int32, ("num_heads", "group_size", "block_shift", "aligned")),
)


def split_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `fd_split.cu`."""
    return (
        *_inputs(dtype),
        *(tensor(name, "int32") for name in ("blocks", "segments", "empty_seqs")),
        tensor("counters", "int32", optional=True),
        *(tensor(name, "float32") for name in ("partial_o", "partial_scales")),
        *_outputs(dtype),
        *_SIZES,
    )


def combine_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `fd_combine.cu`."""
    return (
        tensor("first_splits", "int32"),
        *(tensor(name, "float32") for name in ("partial_o", "partial_scales")),
        *_outputs(dtype),
        *map(int32, ("num_heads", "group_size")),
    )


def one_pass_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `paged_attention.cu`."""
    return *_inputs(dtype), tensor("seq_lens", "int32"), *_outputs(dtype), *_SIZES


def bind_attention_decode(spec: AttentionDecodeSpec, gpu: Gpu) -> BoundOp:
    """Bind decode attention; `max_splits=1` asks for the kernel that never splits."""
    if spec.max_splits == 1:
        return BoundOp(run=_OnePass(spec, gpu).run)
    split = _Split(spec, gpu)
    return BoundOp(
        run=split.run,
        plan=split.plan,
        workspace_bytes=split.workspace_bytes,
        attach=split.attach,
    )


class _OnePass:
    """`paged_attention.cu`: a block for each sequence and bundle of query heads."""

    def __init__(self, spec: AttentionDecodeSpec, gpu: Gpu) -> None:
        self._spec = spec
        self._shape = decode_shape(spec, gpu.max_shared_bytes)
        self._kernel = Kernel(
            gpu,
            decode_variant("paged_attention", spec, self._shape),
            one_pass_params(spec.dtype),
            block=self._shape.threads,
            shared_bytes=self._shape.shared_bytes,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor:
        """q, out [S, H, D]; lse [S, H] fp32."""
        sizes = _sizes(self._spec, q, k_cache, v_cache, step.block_table, scale)
        self._kernel(
            (self._shape.num_parts, self._shape.num_kv_heads, step.num_seqs),
            q,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            out,
            lse,
            *sizes,
        )
        return out


class _Split:
    """`fd_plan.cu` once a step, `fd_split.cu` in each layer, and `fd_combine.cu` if need be.

    Balanced shares merge their partial results in `fd_split` itself. Fixed splits are merged by a
    second kernel.
    """

    def __init__(self, spec: AttentionDecodeSpec, gpu: Gpu) -> None:
        self._spec = spec
        self._shape = shape = decode_shape(spec, gpu.max_shared_bytes)
        self._rule = split_rule(spec, shape)
        self._num_blocks = gpu.num_sms * shape.ctas
        self._layouts: dict[int, Layout] = {}  # by their bytes: `attach` is not told the bounds
        self._parts: dict[str, Tensor] = {}
        self._plan = Kernel(gpu, plan_variant(spec), PLAN_PARAMS, block=_PLAN_THREADS)
        self._split = Kernel(
            gpu,
            decode_variant("fd_split", spec, shape),
            split_params(spec.dtype),
            block=shape.threads,
            shared_bytes=shape.shared_bytes,
        )
        self._combine: Kernel | None = None
        if self._rule.fixed:
            self._combine = Kernel(
                gpu,
                decode_variant("fd_combine", spec, shape),
                combine_params(spec.dtype),
                block=shape.threads,
                shared_bytes=shape.state_bytes,
            )

    def workspace_bytes(self, bounds: Bounds) -> int:
        """Return the bytes of the workspace for steps within `bounds`."""
        layout = Layout(self._spec, self._shape, self._num_blocks, bounds)
        self._layouts[layout.num_bytes] = layout
        return layout.num_bytes

    def attach(self, workspace: Tensor) -> None:
        """Take a workspace [n] uint8, n being an answer of `workspace_bytes`."""
        self._parts = self._layouts[len(workspace)].parts(workspace)
        if self._rule.fixed:
            del self._parts["counters"]

    def plan(self, step: StepMeta) -> None:
        """Cut the step's keys into shares; reads the lengths on the device only."""
        if step.num_seqs == 0:
            return
        parts = self._parts
        self._plan(
            (1,),
            step.seq_lens,
            parts["blocks"],
            parts["segments"],
            parts["empty_seqs"],
            parts["starts"],
            parts["ranks"],
            parts.get("counters"),
            step.num_seqs,
            self._shape.num_bundles,
            self._shape.num_parts,
            self._num_blocks,
            self._shape.tile_tokens,
            self._rule.max_splits,
            self._rule.min_split_tiles,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor:
        """q, out [S, H, D]; lse [S, H] fp32."""
        if step.num_seqs == 0:
            return out
        parts, spec = self._parts, self._spec
        self._split(
            (self._num_blocks,),
            q,
            k_cache,
            v_cache,
            step.block_table,
            parts["blocks"],
            parts["segments"],
            parts["empty_seqs"],
            parts.get("counters"),
            parts["partial_o"],
            parts["partial_scales"],
            out,
            lse,
            *_sizes(spec, q, k_cache, v_cache, step.block_table, scale),
        )
        if self._combine is not None:
            self._combine(
                (self._shape.num_parts, self._shape.num_kv_heads, step.num_seqs),
                parts["starts"],
                parts["partial_o"],
                parts["partial_scales"],
                out,
                lse,
                spec.num_heads,
                spec.group_size,
            )
        return out


def _sizes(
    spec: AttentionDecodeSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    scale: float,
) -> tuple[float, ...]:
    """Return the values of `_SIZES`."""
    k_stride, v_stride = k_cache.stride(0), v_cache.stride(0)
    item_bytes = k_cache.element_size()
    places = (k_cache.data_ptr(), v_cache.data_ptr(), k_stride * item_bytes, v_stride * item_bytes)
    return (
        q.stride(0),
        q.stride(1),
        k_stride,
        v_stride,
        block_table.stride(0),
        scale * math.log2(math.e),
        spec.num_heads,
        spec.group_size,
        spec.block_size.bit_length() - 1,
        all(place % 16 == 0 for place in places),
    )
