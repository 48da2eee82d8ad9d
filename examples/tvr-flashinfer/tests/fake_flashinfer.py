"""A stand-in for FlashInfer on a machine without a GPU: the calls and the rules of 0.6.13.

It computes what FlashInfer computes from the same arguments, and refuses what FlashInfer cannot
take or reads as something else, so that a test of it is a test of what this package hands over.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import torch


class Wrapper:
    """What both wrappers share. `plans` holds the arguments of each plan, for tests to look at."""

    def __init__(self, float_workspace_buffer, *, kv_layout, backend):
        assert (kv_layout, backend) == ("HND", "fa2")
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        self.device = float_workspace_buffer.device
        self.plans = []

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert len(int_workspace_buffer) > 0
        assert int_workspace_buffer.data_ptr() % 16 == 0
        end = float_workspace_buffer.data_ptr() + len(float_workspace_buffer)
        assert end == int_workspace_buffer.data_ptr()

    def _take(self, causal, qo_indptr, kv_indptr, indices, last_page_len, page_size, **sizes):
        for name, array in (("qo", qo_indptr), ("kv", kv_indptr), ("last", last_page_len)):
            assert array.dtype == torch.int32, name
            assert array.device.type == "cpu", name
        assert indices.dtype == torch.int32
        assert indices.is_contiguous()
        assert len(last_page_len) == len(kv_indptr) - 1 == len(qo_indptr) - 1
        assert len(last_page_len) > 0, "FlashInfer divides by the number of sequences"
        assert len(indices) == kv_indptr[-1]
        assert sizes["q_data_type"] == sizes["kv_data_type"]
        q_lens, pages = qo_indptr.diff(), kv_indptr.diff()
        kv_lens = (pages - 1) * page_size + last_page_len
        assert (pages > 0).all()
        assert ((last_page_len > 0) & (last_page_len <= page_size)).all()
        assert (q_lens > 0).all()
        assert (q_lens <= kv_lens).all(), "FlashInfer's causal mask would wrap around"
        self.causal = causal
        self.page_size = page_size
        self.sizes = sizes
        self.q_lens, self.kv_lens = q_lens.tolist(), kv_lens.tolist()
        self.indices = indices.split(pages.tolist())
        self.plans.append({"indptr": kv_indptr, "indices": indices, "last": last_page_len})

    def run(self, q, paged_kv_cache, *, q_scale, out):
        k_cache, v_cache = paged_kv_cache
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.shape[2] == self.page_size
        assert q.dtype == k_cache.dtype == out.dtype == self.sizes["q_data_type"]
        assert q.stride(-1) == 1
        assert len(q) == sum(self.q_lens), "rows are not those that were planned"
        assert out.shape == q.shape
        assert out.is_contiguous()
        start = 0
        for q_len, kv_len, indices in zip(self.q_lens, self.kv_lens, self.indices, strict=True):
            k, v = (
                c[indices.long()].transpose(0, 1).flatten(1, 2)[:, :kv_len].float()
                for c in (k_cache, v_cache)
            )
            rows = slice(start, start + q_len)
            start += q_len
            grouped = q[rows].float().unflatten(1, (len(k), -1))  # [n, KVH, G, D]
            scores = torch.einsum("nkgd,kmd->nkgm", grouped, k)
            scores *= self.sizes["sm_scale"] * q_scale
            if self.causal:
                visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
                scores.masked_fill_(~visible[:, None, None], -math.inf)
            result = torch.einsum("nkgm,kmd->nkgd", scores.softmax(-1), v)
            out[rows] = result.flatten(1, 2).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer, *, kv_layout, use_tensor_cores, backend):
        assert use_tensor_cores
        super().__init__(float_workspace_buffer, kv_layout=kv_layout, backend=backend)

    def plan(self, indptr, indices, last_page_len, *, head_dim, **sizes):
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self._take(False, rows, indptr, indices, last_page_len, **sizes)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        *,
        head_dim_qk,
        causal,
        **sizes,
    ):
        self._take(
            causal, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, **sizes
        )


def rmsnorm(out, x, weight, eps, enable_pdl):
    assert x.dim() == out.dim() == 2
    assert len(x) > 0, "CUDA refuses an empty grid"
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(normed * weight.float())


def install(monkeypatch):
    """Put the stand-in in the place of `flashinfer`."""
    kernel = SimpleNamespace(build_and_load=lambda: None)
    modules = {
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": BatchDecodeWithPagedKVCacheWrapper,
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
        },
        "flashinfer.jit": {"gen_batch_prefill_module": lambda *args: kernel},
        "flashinfer.norm": {"get_norm_module": lambda: SimpleNamespace(rmsnorm=rmsnorm)},
        "flashinfer.utils": {"device_support_pdl": lambda device: False},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
