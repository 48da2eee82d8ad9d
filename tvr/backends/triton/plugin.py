"""The hooks of the Triton backend, and what it declares."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tvr.backends.triton.probe import MIN_SM
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
from tvr.errors import ConfigError
from tvr.hookspecs import hookimpl

if TYPE_CHECKING:
    from tvr.backends.triton.launch import Gpu

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
SMALL_BATCH_ROWS, FUSED_ROWS = 8, 1

#: The interpreter computes with NumPy, which has no bfloat16: some forms of it give garbage.
INTERPRETED_DTYPES = ("float32", "float16")

#: The module of each op: it has `bind_<op>(spec, gpu)`.
OP_MODULES = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "rope": "rope",
    "rope_kv_write": "rope",
    "kv_write": "kv",
    "attention_decode": "decode",
    "attention_prefill": "prefill",
    "silu_mul": "activation",
    "linear": "linear",
    "fused_linear": "fused_linear",
    "argmax": "argmax",
    "prepare_step": "prepare_step",
    "sample": "sample",
    "top_logprobs": "top_logprobs",
}


def backend_info() -> BackendInfo:
    """Return what the kernels serve."""

    flags = frozenset({"deterministic", "batch_invariant"})

    def boxes(*fields: str, on_cpu: frozenset[str] = flags, **axes: Any) -> list[Box]:  # noqa: ANN401
        own: dict[str, Any] = axes | {"fields": frozenset(fields)}
        return [
            # First, so that bfloat16 on a CPU is refused for its dtype.
            Box(dtypes=INTERPRETED_DTYPES, devices=("cpu",), flags=on_cpu, **own),
            Box(dtypes=DTYPES, min_sm=MIN_SM, flags=flags | {"cuda_graph", "plan_in_graph"}, **own),
        ]

    heads: dict[str, Any] = {"head_dims": HEAD_DIMS}
    paged: dict[str, Any] = heads | {"block_sizes": BLOCK_SIZES}
    return BackendInfo(
        name="triton",
        abi=(1, 0),
        ops={
            "rms_norm": boxes(),
            "add_rms_norm": boxes(),
            "rope": boxes("rotary_dim", **heads),
            "kv_write": boxes(**paged),
            "rope_kv_write": boxes("rotary_dim", **paged),
            "attention_decode": boxes("return_lse", "max_splits", **paged),
            # NumPy's products give a row other bits where it stands elsewhere in its tile.
            "attention_prefill": boxes(
                *("return_lse", "max_splits", "max_q_len"),
                on_cpu=flags - {"batch_invariant"},
                **paged,
            ),
            "silu_mul": boxes(),
            "linear": boxes("bias", "out_dtype", max_rows=SMALL_BATCH_ROWS),
            "fused_linear": boxes(
                *("bias", "out_dtype", "rms_norm", "silu_mul", "add"), max_rows=FUSED_ROWS
            ),
            "argmax": boxes(),
            "prepare_step": boxes(),
            "sample": boxes(),
            "top_logprobs": boxes(),
        },
    )


def bind(spec: OpSpec, gpu: Gpu) -> BoundOp:
    """Return `spec`'s op bound on `gpu`; its module is imported only now."""
    module = importlib.import_module(f"tvr.backends.triton.{OP_MODULES[spec.op]}")
    function: Callable[[OpSpec, Gpu], BoundOp] = getattr(module, f"bind_{spec.op}")
    return function(spec, gpu)


INFO = backend_info()


def _bind(spec: OpSpec, device: DeviceFacts) -> BoundOp | None:
    if why_not(INFO, spec, device):
        return None
    from tvr.backends.triton.launch import open_gpu

    return bind(spec, open_gpu(str(device)))


@hookimpl
def tvr_backend_info() -> BackendInfo:
    return INFO


@hookimpl
def tvr_configured(config: Mapping[str, Any]) -> None:
    if options := config["options"].get("triton"):
        raise ConfigError(
            f"[options.triton] has {', '.join(sorted(options))}; the Triton backend reads no "
            "options: take them out"
        )


@hookimpl
def tvr_probe(device: DeviceFacts) -> list[str]:
    from tvr.backends.triton.probe import why_unavailable

    return why_unavailable(device)


@hookimpl
def tvr_bind_rms_norm(spec: RmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_add_rms_norm(spec: AddRmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_rope(spec: RopeSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_kv_write(spec: KvWriteSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_rope_kv_write(spec: RopeKvWriteSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_attention_decode(spec: AttentionDecodeSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_attention_prefill(spec: AttentionPrefillSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_silu_mul(spec: SiluMulSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_linear(spec: LinearSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_fused_linear(spec: FusedLinearSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_argmax(spec: ArgmaxSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_prepare_step(spec: PrepareStepSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_sample(spec: SampleSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)


@hookimpl
def tvr_bind_top_logprobs(spec: TopLogprobsSpec, device: DeviceFacts) -> BoundOp | None:
    return _bind(spec, device)
