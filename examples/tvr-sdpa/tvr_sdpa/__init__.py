"""A tvr backend that serves both attention ops through torch's scaled_dot_product_attention.

This module is the plug-in: tvr finds it by the entry point in pyproject.toml and calls the
functions marked with `hookimpl`. The arithmetic is in `attention.py`.
"""

from __future__ import annotations

from tvr import hookimpl
from tvr.contract import (
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    BackendInfo,
    BoundOp,
    Box,
    DeviceFacts,
    why_not,
)
from tvr_sdpa.attention import decode, prefill

# What is true of both ops. Head sizes, block sizes and group sizes are left out: any will do.
# So are `window`, `softcap`, `return_lse` and the other special wishes that a spec may have: tvr
# does not ask a backend for what it does not declare, and takes the next one instead.
BOX = Box(
    dtypes=["float32", "float16", "bfloat16"],
    devices=["cpu", "cuda"],
    flags=frozenset({"deterministic"}),
)

INFO = BackendInfo(
    name="sdpa",
    abi=(1, 0),
    ops={"attention_decode": [BOX], "attention_prefill": [BOX]},
)


@hookimpl
def tvr_backend_info() -> BackendInfo:
    return INFO


@hookimpl
def tvr_bind_attention_decode(spec: AttentionDecodeSpec, device: DeviceFacts) -> BoundOp | None:
    # `why_not` reads the declaration above, so that what is bound and what is declared agree.
    return None if why_not(INFO, spec, device) else BoundOp(run=decode)


@hookimpl
def tvr_bind_attention_prefill(spec: AttentionPrefillSpec, device: DeviceFacts) -> BoundOp | None:
    return None if why_not(INFO, spec, device) else BoundOp(run=prefill)
