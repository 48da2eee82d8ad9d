"""Hooks of the reference backend, named "torch".

It serves every op of the contract on CPU and CUDA in all dtypes, for any head_dim, block size and
group size. Matmul precision is torch's own: core must leave
`torch.get_float32_matmul_precision()` at its default "highest", or fp32 would mean TF32.
"""

from __future__ import annotations

import torch

from tvr.backends.torch_ref import (
    activation,
    argmax,
    attention,
    fused_linear,
    kv,
    linear,
    norm,
    prepare,
    rope,
    sample,
    top_logprobs,
)
from tvr.contract import (
    DTYPES,
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    BackendInfo,
    BoundOp,
    Box,
    DeviceFacts,
    FusedLinearSpec,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    PrepareStepSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SampleSpec,
    SiluMulSpec,
    TopLogprobsSpec,
    why_not,
)
from tvr.hookspecs import hookimpl


def _boxes(*fields: str, cuda_graph: bool) -> list[Box]:
    """One box for everything; `cuda_graph` is False for ops that read host or device counts."""
    flags = {"batch_invariant", "deterministic"} | ({"cuda_graph"} if cuda_graph else set())
    return [
        Box(
            dtypes=DTYPES,
            devices=("cpu", "cuda"),
            fields=frozenset(fields),
            flags=frozenset(flags),
        )
    ]


_ATTENTION_FIELDS = ("kv_dtype", "window", "softcap", "causal", "return_lse", "max_splits")
_FUSED_FIELDS = ("bias", "out_dtype", "rms_norm", "silu_mul", "add")

_INFO = BackendInfo(
    name="torch",
    abi=(1, 0),
    ops={
        "rms_norm": _boxes(cuda_graph=True),
        "add_rms_norm": _boxes(cuda_graph=True),
        "rope": _boxes("rotary_dim", cuda_graph=True),
        "kv_write": _boxes("kv_dtype", cuda_graph=False),
        "rope_kv_write": _boxes("rotary_dim", "kv_dtype", cuda_graph=False),
        "attention_decode": _boxes(*_ATTENTION_FIELDS, cuda_graph=False),
        "attention_prefill": _boxes(*_ATTENTION_FIELDS, "max_q_len", cuda_graph=False),
        "silu_mul": _boxes(cuda_graph=True),
        "linear": _boxes("bias", "out_dtype", cuda_graph=True),
        "fused_linear": _boxes(*_FUSED_FIELDS, cuda_graph=True),
        "argmax": _boxes(cuda_graph=True),
        "prepare_step": _boxes(cuda_graph=True),
        "sample": _boxes(cuda_graph=False),
        "top_logprobs": _boxes(cuda_graph=True),
    },
)


@hookimpl
def tvr_backend_info() -> BackendInfo:
    return _INFO


@hookimpl
def tvr_probe(device: DeviceFacts) -> list[str]:
    if device.type not in ("cpu", "cuda"):
        return [f"device type {device.type!r} is not among cpu, cuda"]
    if device.type == "cuda" and not torch.cuda.is_available():
        return ["torch sees no CUDA device"]
    return []


def _declared(spec: OpSpec, device: DeviceFacts) -> bool:
    return not why_not(_INFO, spec, device)


@hookimpl
def tvr_bind_rms_norm(spec: RmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    return norm.bind_rms_norm(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_add_rms_norm(spec: AddRmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    return norm.bind_add_rms_norm(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_rope(spec: RopeSpec, device: DeviceFacts) -> BoundOp | None:
    return rope.bind_rope(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_kv_write(spec: KvWriteSpec, device: DeviceFacts) -> BoundOp | None:
    return kv.bind_kv_write() if _declared(spec, device) else None


@hookimpl
def tvr_bind_rope_kv_write(spec: RopeKvWriteSpec, device: DeviceFacts) -> BoundOp | None:
    return rope.bind_rope_kv_write(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_attention_decode(spec: AttentionDecodeSpec, device: DeviceFacts) -> BoundOp | None:
    return attention.bind_decode(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_attention_prefill(spec: AttentionPrefillSpec, device: DeviceFacts) -> BoundOp | None:
    return attention.bind_prefill(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_silu_mul(spec: SiluMulSpec, device: DeviceFacts) -> BoundOp | None:
    return activation.bind_silu_mul(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_linear(spec: LinearSpec, device: DeviceFacts) -> BoundOp | None:
    return linear.bind_linear(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_fused_linear(spec: FusedLinearSpec, device: DeviceFacts) -> BoundOp | None:
    return fused_linear.bind_fused_linear(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_argmax(spec: ArgmaxSpec, device: DeviceFacts) -> BoundOp | None:
    return argmax.bind_argmax() if _declared(spec, device) else None


@hookimpl
def tvr_bind_prepare_step(spec: PrepareStepSpec, device: DeviceFacts) -> BoundOp | None:
    return prepare.bind_prepare_step(spec) if _declared(spec, device) else None


@hookimpl
def tvr_bind_sample(spec: SampleSpec, device: DeviceFacts) -> BoundOp | None:
    return sample.bind_sample() if _declared(spec, device) else None


@hookimpl
def tvr_bind_top_logprobs(spec: TopLogprobsSpec, device: DeviceFacts) -> BoundOp | None:
    return top_logprobs.bind_top_logprobs(spec) if _declared(spec, device) else None
