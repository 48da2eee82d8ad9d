"""A tvr backend that serves paged attention and RMSNorm through FlashInfer, on CUDA.

This module declares and binds; it imports FlashInfer no earlier than tvr asks whether the backend
can run, so that `tvr backends` works, and says why, on a machine without it.
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
    RmsNormSpec,
    why_not,
)

_DTYPES = ("float16", "bfloat16")

# Any block size and any group size: both are run-time values in the kernel that is used.
# No "return_lse": it comes from a sum of weights in half precision, see README.md.
# No "cuda_graph": FlashInfer plans on the host anew for each step, see README.md.
ATTENTION = Box(
    dtypes=_DTYPES,
    min_sm=80,
    head_dims=(64, 128, 256),
    flags=frozenset({"deterministic"}),
)

# x * rsqrt(mean) * weight stays in fp32 and is rounded at the end: "once". A row has a block of
# its own, whose shape depends on the hidden size alone.
NORM = Box(
    dtypes=_DTYPES,
    min_sm=80,
    flags=frozenset({"batch_invariant", "cuda_graph", "deterministic"}),
    norm_rounding="once",
)

INFO = BackendInfo(
    name="flashinfer",
    abi=(1, 0),
    ops={"attention_decode": [ATTENTION], "attention_prefill": [ATTENTION], "rms_norm": [NORM]},
)


@hookimpl
def tvr_backend_info() -> BackendInfo:
    return INFO


@hookimpl
def tvr_probe(device: DeviceFacts) -> list[str]:
    if device.type != "cuda":
        return [f"needs a CUDA device, not {device}"]
    try:
        import flashinfer  # noqa: F401
    except Exception as e:  # a library that is missing deep inside, or does not fit the driver
        return [f"flashinfer cannot be imported: {type(e).__name__}: {e}"]
    return []


# The hooks compile, or load from FlashInfer's cache, what they bind: should nvcc be missing, tvr
# hears of it here and takes the next backend, and no token has to wait for a compiler.


@hookimpl
def tvr_bind_attention_decode(spec: AttentionDecodeSpec, device: DeviceFacts) -> BoundOp | None:
    if why_not(INFO, spec, device):
        return None
    from tvr_flashinfer.attention import Decode

    return Decode(spec, device).bound()


@hookimpl
def tvr_bind_attention_prefill(spec: AttentionPrefillSpec, device: DeviceFacts) -> BoundOp | None:
    if why_not(INFO, spec, device):
        return None
    from tvr_flashinfer.attention import Prefill

    return Prefill(spec, device).bound()


@hookimpl
def tvr_bind_rms_norm(spec: RmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    if why_not(INFO, spec, device):
        return None
    from tvr_flashinfer.norm import bind_rms_norm

    return bind_rms_norm(device)
