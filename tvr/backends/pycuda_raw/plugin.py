"""The hooks of the CUDA backend, and what it declares."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr.backends.pycuda_raw.cache import configured_cache_dir
from tvr.backends.pycuda_raw.variants import MIN_SM
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
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SiluMulSpec,
    why_not,
)
from tvr.hookspecs import hookimpl

if TYPE_CHECKING:
    from tvr.backends.pycuda_raw.launch import Gpu

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
SMALL_BATCH_ROWS = 8
FUSED_ROWS = 1

#: The module of each op that is bound by a function of its own: `bind_<op>(spec, gpu)`.
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
    "fused_linear": "gemv",
    "argmax": "argmax",
}


def backend_info(
    name: str = "pycuda",
    devices: Sequence[str] = ("cuda",),
    flags: frozenset[str] = frozenset(
        {"cuda_graph", "plan_in_graph", "deterministic", "batch_invariant"}
    ),
) -> BackendInfo:
    """Return what the kernels serve; on other devices than CUDA's that is for tests to say."""

    def boxes(*fields: str, **axes: Any) -> list[Box]:  # noqa: ANN401
        return [
            Box(
                dtypes=DTYPES,
                devices=devices,
                min_sm=MIN_SM,
                flags=flags,
                fields=frozenset(fields),
                **axes,
            )
        ]

    heads: dict[str, Any] = {"head_dims": HEAD_DIMS}
    paged: dict[str, Any] = heads | {"block_sizes": BLOCK_SIZES}
    return BackendInfo(
        name=name,
        abi=(1, 0),
        ops={
            "rms_norm": boxes(),
            "add_rms_norm": boxes(),
            "rope": boxes("rotary_dim", **heads),
            "kv_write": boxes(**paged),
            "rope_kv_write": boxes("rotary_dim", **paged),
            "attention_decode": boxes("return_lse", "max_splits", **paged),
            "attention_prefill": boxes("return_lse", "max_splits", "max_q_len", **paged),
            "silu_mul": boxes(),
            "linear": boxes("bias", "out_dtype", max_rows=SMALL_BATCH_ROWS),
            "fused_linear": boxes(
                *("bias", "out_dtype", "rms_norm", "silu_mul", "add"), max_rows=FUSED_ROWS
            ),
            "argmax": boxes(),
        },
    )


def bind(spec: OpSpec, gpu: Gpu) -> BoundOp:
    """Return `spec`'s op bound on `gpu`; its module is imported only now."""
    module = importlib.import_module(f"tvr.backends.pycuda_raw.{OP_MODULES[spec.op]}")
    function: Callable[[OpSpec, Gpu], BoundOp] = getattr(module, f"bind_{spec.op}")
    return function(spec, gpu)


class PycudaBackend:
    """The backend as an object: it keeps the options it was configured with."""

    def __init__(self) -> None:
        self._info = backend_info()
        self._cache_dir: Path | None = None

    @hookimpl
    def tvr_backend_info(self) -> BackendInfo:
        return self._info

    @hookimpl
    def tvr_configured(self, config: Mapping[str, Any]) -> None:
        self._cache_dir = configured_cache_dir(config["options"].get("pycuda", {}))

    @hookimpl
    def tvr_probe(self, device: DeviceFacts) -> list[str]:
        from tvr.backends.pycuda_raw.probe import why_unavailable

        return why_unavailable(device)

    @hookimpl
    def tvr_stream(self, device: DeviceFacts) -> Any:  # noqa: ANN401
        return self._gpu(device).stream

    def _gpu(self, device: DeviceFacts) -> Any:  # noqa: ANN401
        from tvr.backends.pycuda_raw.device import open_gpu

        assert device.index is not None, "core gives CUDA devices with their index"
        return open_gpu(device.index, self._cache_dir)

    def _bind(self, spec: OpSpec, device: DeviceFacts) -> BoundOp | None:
        if why_not(self._info, spec, device):
            return None
        return bind(spec, self._gpu(device))

    @hookimpl
    def tvr_bind_rms_norm(self, spec: RmsNormSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_add_rms_norm(self, spec: AddRmsNormSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_rope(self, spec: RopeSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_kv_write(self, spec: KvWriteSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_rope_kv_write(self, spec: RopeKvWriteSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_attention_decode(
        self, spec: AttentionDecodeSpec, device: DeviceFacts
    ) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_attention_prefill(
        self, spec: AttentionPrefillSpec, device: DeviceFacts
    ) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_silu_mul(self, spec: SiluMulSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_linear(self, spec: LinearSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_fused_linear(self, spec: FusedLinearSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)

    @hookimpl
    def tvr_bind_argmax(self, spec: ArgmaxSpec, device: DeviceFacts) -> BoundOp | None:
        return self._bind(spec, device)
