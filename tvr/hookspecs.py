"""Every hook of tvr. A hook binds; it does not run: the hot path calls what a hook returned.

`device` is a `DeviceFacts`; `str(device)` is torch's name of it ("cuda:0").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pluggy import HookimplMarker, HookspecMarker

if TYPE_CHECKING:
    from tvr.contract import (
        AddRmsNormSpec,
        ArgmaxSpec,
        AttentionDecodeSpec,
        AttentionPrefillSpec,
        BackendInfo,
        BoundOp,
        DeviceFacts,
        FusedLinearSpec,
        KvWriteSpec,
        LinearSpec,
        PrepareStepSpec,
        RmsNormSpec,
        RopeKvWriteSpec,
        RopeSpec,
        SampleSpec,
        SiluMulSpec,
        TopLogprobsSpec,
    )

PROJECT = "tvr"
hookspec = HookspecMarker(PROJECT)
hookimpl = HookimplMarker(PROJECT)


@hookspec
def tvr_backend_info() -> BackendInfo:  # type: ignore[empty-body]
    """Return what the backend is and declares. Data only: must not touch a device."""


@hookspec(historic=True)
def tvr_configured(config: Mapping[str, Any]) -> None:
    """Note the plug-in configuration; called once, when the plugin is registered.

    `config` is read-only; `config["options"].get(name, {})` are the options of backend `name`.
    """


@hookspec
def tvr_probe(device: DeviceFacts) -> list[str]:  # type: ignore[empty-body]
    """Return why the backend cannot run on `device` (no driver, no compiler); empty: it can."""


@hookspec
def tvr_stream(device: DeviceFacts) -> Any:  # noqa: ANN401
    """Return a `torch.cuda.Stream` if the backend launches only on one of its own, else None.

    The first backend in order that returns one owns the engine's stream; ops of any other such
    backend fork from it and join it with events.
    """


@hookspec
def tvr_bind_rms_norm(spec: RmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `rms_norm` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_add_rms_norm(spec: AddRmsNormSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `add_rms_norm` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_rope(spec: RopeSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `rope` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_kv_write(spec: KvWriteSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `kv_write` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_rope_kv_write(spec: RopeKvWriteSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `rope_kv_write` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_attention_decode(spec: AttentionDecodeSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `attention_decode` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_attention_prefill(spec: AttentionPrefillSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `attention_prefill` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_silu_mul(spec: SiluMulSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `silu_mul` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_linear(spec: LinearSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `linear` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_fused_linear(spec: FusedLinearSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `fused_linear` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_argmax(spec: ArgmaxSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `argmax` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_prepare_step(spec: PrepareStepSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `prepare_step` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_sample(spec: SampleSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `sample` bound for `spec`, or None: not me."""


@hookspec
def tvr_bind_top_logprobs(spec: TopLogprobsSpec, device: DeviceFacts) -> BoundOp | None:
    """Return `top_logprobs` bound for `spec`, or None: not me."""
