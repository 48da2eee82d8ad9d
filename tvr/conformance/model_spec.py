"""The spec of a tiny model that engine checks run a backend in, and the specs that it binds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tvr.contract import (
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionPrefillSpec,
    FusedLinearSpec,
    LinearSpec,
    OpSpec,
    PrepareStepSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    SampleSpec,
    SiluMulSpec,
    TopLogprobsSpec,
)

if TYPE_CHECKING:
    from tvr.conformance.case import Case

#: `Check.ops` of the checks that run a model.
ENGINE = ("engine",)

#: Up to this many rows core gives a product to the `linear` bound for few rows.
SMALL_BATCH_ROWS = 8
#: Up to this many it is fused with what stands around it.
FUSED_ROWS = 1

#: Most log-probabilities that core lets a request ask for.
MOST_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class ModelSpec(OpSpec):
    """A Llama model. "engine" is no op of the contract: it stands for all that a model binds."""

    op: ClassVar[str] = "engine"

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


def model_spec(case: Case) -> ModelSpec:
    """Return the case's spec, known to be that of a model."""
    assert isinstance(case.spec, ModelSpec)
    return case.spec


def batch_invariant(case: Case) -> ModelSpec:
    """Return the spec of the case's model, asked to be batch-invariant."""
    return replace(model_spec(case), batch_invariant=True)


def bound_specs(spec: ModelSpec) -> list[OpSpec]:
    """Return every spec that an engine binds for this model.

    The fused products are those of an engine whose backends serve them whole.
    """
    own: dict[str, Any] = {"dtype": spec.dtype, "batch_invariant": spec.batch_invariant}
    paged = {
        **own,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": spec.block_size,
    }
    return [
        RmsNormSpec(**own, hidden_size=spec.hidden_size),
        AddRmsNormSpec(**own, hidden_size=spec.hidden_size),
        RopeKvWriteSpec(**paged),
        AttentionDecodeSpec(**paged),
        AttentionPrefillSpec(**paged),
        SiluMulSpec(**own, intermediate_size=spec.intermediate_size),
        *_products(spec, own),
        *_fused_products(spec, own),
        ArgmaxSpec(**own, vocab_size=spec.vocab_size),
        PrepareStepSpec(**own, block_size=spec.block_size),
        SampleSpec(**own, vocab_size=spec.vocab_size),
        TopLogprobsSpec(
            **own, vocab_size=spec.vocab_size, num_top=min(MOST_LOGPROBS, spec.vocab_size)
        ),
    ]


def op_specs(spec: ModelSpec) -> list[OpSpec]:
    """Return every spec with a share in this model: those bound, and the parts of composites."""
    bound = bound_specs(spec)
    return list(dict.fromkeys([*bound, *(part for whole in bound for part in whole.parts())]))


def why_not_model(spec: ModelSpec, why_not: Callable[[OpSpec], list[str]]) -> list[str]:
    """Return why a backend has no part in this model; empty: it serves some op of it.

    A batch-invariant model is for backends that declare that of every op they serve.

    Args:
        spec: the model's.
        why_not: returns why the backend does not declare an op's spec.
    """
    served = [s for s in op_specs(replace(spec, batch_invariant=False)) if not why_not(s)]
    if not served:
        return ["serves none of the ops of this model"]
    if not spec.batch_invariant:
        return []
    # For few rows there is no op of its own then: two ops round differently.
    kept = [s for s in served if getattr(s, "max_rows", None) is None]
    reasons = {
        f"{s.op}: {reason}" for s in kept for reason in why_not(replace(s, batch_invariant=True))
    }
    return sorted(reasons) if kept else ["serves none of the ops of this model"]


def _products(spec: ModelSpec, own: dict[str, Any]) -> list[OpSpec]:
    limits = (None,) if spec.batch_invariant else (None, SMALL_BATCH_ROWS)
    return [
        LinearSpec(**own, in_features=n_in, out_features=n_out, max_rows=max_rows)
        for n_in, n_out in (*_layer_sizes(spec), (spec.hidden_size, spec.vocab_size))
        for max_rows in limits
    ]


def _fused_products(spec: ModelSpec, own: dict[str, Any]) -> list[OpSpec]:
    """Return what few rows of a layer go to; a batch-invariant model has one op a product."""
    if spec.batch_invariant:
        return []
    add: dict[str, Any] = {"add": True}
    norm: dict[str, Any] = {"rms_norm": True}
    return [
        FusedLinearSpec(**own, in_features=n_in, out_features=n_out, max_rows=FUSED_ROWS, **fused)
        for (n_in, n_out), fused in zip(
            _layer_sizes(spec), (norm, add, norm | {"silu_mul": True}, add), strict=True
        )
    ]


def _layer_sizes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return in and out features of a layer's products: qkv, o, gate and up, down."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [
        (spec.hidden_size, q_size + 2 * kv_size),
        (q_size, spec.hidden_size),
        (spec.hidden_size, 2 * spec.intermediate_size),
        (spec.intermediate_size, spec.hidden_size),
    ]
