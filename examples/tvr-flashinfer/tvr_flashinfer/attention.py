"""Both attention ops by FlashInfer's batch wrappers, which plan once a step and run in each layer.

tvr's cache [blocks, KVH, block_size, D] is what FlashInfer calls pages in HND layout, and its
kernel takes the strides of the blocks as they are. Both wrappers are told to use the FA2 kernel
for prefill, the decode wrapper by `use_tensor_cores`: it takes any group size, where FlashInfer's
own decode kernel takes a few, and there is one module to compile instead of two.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from tvr.contract import AttentionSpec, BoundOp, Bounds, DeviceFacts
from tvr_flashinfer.kernels import require_attention_kernel
from tvr_flashinfer.pages import Pages, pages_of

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import StepMeta

_ALIGNMENT = 256  # of the two parts of the workspace


class _Attention(ABC):
    """What both ops share: the workspace, the plan, and rows without keys."""

    def __init__(self, spec: AttentionSpec, device: DeviceFacts) -> None:
        self._spec = spec
        self._dtype = getattr(torch, spec.dtype)
        self._num_sms = num_sms(device)
        self._wrapper: Any = None
        self._pages: Pages | None = None
        self._planned: torch.cuda.Event | None = None
        require_attention_kernel(spec.dtype, spec.head_dim)

    @abstractmethod
    def bound(self) -> BoundOp:
        """Return the op."""

    @abstractmethod
    def _max_rows(self, bounds: Bounds) -> int:
        """Return the most rows of a step."""

    @abstractmethod
    def _tile_rows(self) -> int:
        """Return the most rows (queries times heads of a group) of a tile of the kernel."""

    @abstractmethod
    def _q_lens(self, step: StepMeta) -> list[int]:
        """Return the rows of each sequence."""

    @abstractmethod
    def _new_wrapper(self, workspace: Tensor) -> Any:  # noqa: ANN401
        """Return FlashInfer's wrapper over its float workspace."""

    @abstractmethod
    def _plan(self, pages: Pages, **sizes: Any) -> None:  # noqa: ANN401
        """Let FlashInfer plan."""

    # FlashInfer wants two workspaces: one in which it leaves the partial results of long
    # sequences, split over several blocks of the GPU, and one for the plan. It raises if one is
    # too small, so both are sized by the formulas of its `PrefillPlan` at the bounds.

    def workspace_bytes(self, bounds: Bounds) -> int:
        spec = self._spec
        rows, seqs = self._max_rows(bounds), bounds.max_num_seqs
        # Tiles have at least 16 rows. Sequences are split only while that fills the GPU: it counts
        # on two blocks for each multiprocessor.
        num_tiles = math.ceil(rows * spec.group_size / 16) + seqs
        num_split = 2 * self._num_sms // spec.num_kv_heads
        partial_bytes = 4 * num_split * spec.num_heads * self._tile_rows() * (spec.head_dim + 1)
        self._float_bytes = _aligned(partial_bytes + _ALIGNMENT)
        plan_bytes = 16 * (max(num_tiles, num_split) + rows + seqs)
        return self._float_bytes + _aligned(plan_bytes + _ALIGNMENT)

    def attach(self, workspace: Tensor) -> None:
        float_workspace = workspace[: self._float_bytes]
        self._wrapper = self._new_wrapper(float_workspace)
        self._wrapper.reset_workspace_buffer(float_workspace, workspace[self._float_bytes :])

    def plan(self, step: StepMeta) -> None:
        self._pages = pages = pages_of(step, self._q_lens(step), self._spec.block_size)
        if pages.num_rows == 0:
            return
        # FlashInfer writes its plan into pinned memory and has it copied to the device in stream
        # order. The step before may still be waiting for its copy: do not write over it.
        if self._planned is not None:
            self._planned.synchronize()
        self._plan(
            pages,
            page_size=self._spec.block_size,
            sm_scale=1.0,  # `run` is given the scale, and multiplies this by it
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        if step.block_table.is_cuda:
            self._planned = torch.cuda.Event()
            self._planned.record()

    def _attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor
    ) -> Tensor:
        """Run FlashInfer on the rows that see a key; the others get zeros."""
        pages = self._pages
        assert pages is not None, "run before plan"
        if pages.rows is None and pages.num_rows:
            self._wrapper.run(q, (k_cache, v_cache), q_scale=scale, out=out)
            return out
        out.zero_()
        if pages.num_rows:
            some = out[pages.rows]
            self._wrapper.run(q[pages.rows], (k_cache, v_cache), q_scale=scale, out=some)
            out[pages.rows] = some
        return out


class Decode(_Attention):
    """`attention_decode`: one row a sequence."""

    def bound(self) -> BoundOp:
        def run(
            q: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            step: StepMeta,
            *,
            scale: float,
            out: Tensor,
            lse: Tensor | None = None,
        ) -> Tensor:
            """q, out [S, H, D]; lse: never given, for it is not declared."""
            return self._attend(q, k_cache, v_cache, scale, out)

        return BoundOp(
            run=run, plan=self.plan, workspace_bytes=self.workspace_bytes, attach=self.attach
        )

    def _max_rows(self, bounds: Bounds) -> int:
        return bounds.max_num_seqs

    def _tile_rows(self) -> int:
        group = self._spec.group_size
        if group > 64 and self._spec.head_dim < 256:
            return 128
        return 64 if group > 16 else 16

    def _q_lens(self, step: StepMeta) -> list[int]:
        return [1] * step.num_seqs

    def _new_wrapper(self, workspace: Tensor) -> Any:  # noqa: ANN401
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace, kv_layout="HND", use_tensor_cores=True, backend="fa2"
        )

    def _plan(self, pages: Pages, **sizes: Any) -> None:  # noqa: ANN401
        spec = self._spec
        self._wrapper.plan(
            pages.kv_indptr,
            pages.indices,
            pages.last_page_len,
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            **sizes,
        )


class Prefill(_Attention):
    """`attention_prefill`: a chunk of rows a sequence, masked causally."""

    def bound(self) -> BoundOp:
        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            k_cache: Tensor,
            v_cache: Tensor,
            step: StepMeta,
            *,
            scale: float,
            out: Tensor,
            lse: Tensor | None = None,
        ) -> Tensor:
            """q, out [T, H, D]. k and v are in the cache already; lse is never given."""
            return self._attend(q, k_cache, v_cache, scale, out)

        return BoundOp(
            run=run, plan=self.plan, workspace_bytes=self.workspace_bytes, attach=self.attach
        )

    def _max_rows(self, bounds: Bounds) -> int:
        return bounds.max_num_tokens

    def _tile_rows(self) -> int:
        return 128 if self._spec.head_dim < 256 else 64

    def _q_lens(self, step: StepMeta) -> list[int]:
        # Lengths of chunks are on the device only. One wait a step: FlashInfer plans on the host.
        return step.cu_seqlens_q.diff().tolist()

    def _new_wrapper(self, workspace: Tensor) -> Any:  # noqa: ANN401
        return BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa2")

    def _plan(self, pages: Pages, **sizes: Any) -> None:  # noqa: ANN401
        spec = self._spec
        self._wrapper.plan(
            pages.qo_indptr,
            pages.kv_indptr,
            pages.indices,
            pages.last_page_len,
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim,
            causal=True,
            **sizes,
        )


def num_sms(device: DeviceFacts) -> int:
    """Return the number of multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(str(device)).multi_processor_count


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
