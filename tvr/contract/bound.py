"""Bound ops: what a bind hook returns and what core calls, layer after layer.

`out` and every other named output is allocated by the caller, filled, and returned; nothing else
is written. Inputs may be strided as long as their last dimension is contiguous. Shapes: T tokens,
S sequences, H query heads, KVH KV heads, D head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tvr.errors import PluginLoadError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The largest step that will ever be run; workspaces and graphs are sized by it."""

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    max_q_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeta:
    """A step's sequences, as `plan` and the attention ops see them.

    In a captured graph the host integers are the bounds and only device data varies.

    Attributes:
        block_table: [num_seqs, max_blocks] int32, ids past a sequence's end are garbage.
        seq_lens: [num_seqs] int32, tokens in the cache including this step's; 0: padding row.
        cu_seqlens_q: [num_seqs + 1] int32, running sum of new tokens, from 0.
        num_seqs, num_tokens, max_q_len, max_seq_len: host sizes of the above.
        seq_lens_cpu: `seq_lens` on the host.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    num_seqs: int
    num_tokens: int
    max_q_len: int
    max_seq_len: int
    seq_lens_cpu: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class BoundOp:
    """An op bound for one spec on one device.

    Attributes:
        run: called in every layer; its signature is that of the op's Protocol below.
        plan: called once a step before the layers, on the current stream, outside graph
            capture; may write only the workspace. `attention_decode` is given the step's
            decodes, `attention_prefill` its prefill chunks, any other op the whole step.
        workspace_bytes: bytes of workspace for the given bounds.
        attach: given the workspace ([n] uint8, zeroed, 256-byte aligned, fixed address) once,
            before the first `plan` or `run`. Needed with `workspace_bytes`.
        pack: `linear` only: turn `weight` [out, in] and `bias` ([out] or None) into the opaque
            `packed` that `run` is given. None: the pair `(weight, bias)`.
    """

    run: Callable[..., Any]
    plan: Callable[[StepMeta], None] | None = None
    workspace_bytes: Callable[[Bounds], int] | None = None
    attach: Callable[[Tensor], None] | None = None
    pack: Callable[[Tensor, Tensor | None], Any] | None = None


class RmsNorm(Protocol):
    """x, out [..., hidden]; weight [hidden]."""

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor: ...


class AddRmsNorm(Protocol):
    """x, residual, out, residual_out [..., hidden]. residual_out may be residual itself."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        *,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class Rope(Protocol):
    """q, q_out [T, H, D]; k, k_out [T, KVH, D]; positions [T] int64; cache [max, rotary_dim] fp32.

    Rotates in fp32 and rounds once. Outputs may be the inputs.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class KvWrite(Protocol):
    """k, v [T, KVH, D]; caches [blocks, KVH, block_size, D]; slot_mapping [T] int64, -1: skip."""

    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None: ...


class RopeKvWrite(Protocol):
    """`Rope`, then `KvWrite` of the rotated k and of v."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class AttentionDecode(Protocol):
    """q, out [S, H, D]; lse [S, H] fp32, natural log. An empty row gives zeros and lse -inf."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor: ...


class AttentionPrefill(Protocol):
    """q, out [T, H, D]; k, v [T, KVH, D], which are in the cache already; lse [T, H] fp32."""

    def __call__(
        self,
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
    ) -> Tensor: ...


class SiluMul(Protocol):
    """x [T, 2 * I], gate columns then up columns; out [T, I]."""

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor: ...


class Linear(Protocol):
    """x [T, in]; out [T, out]; packed: what `pack` returned."""

    def __call__(self, x: Tensor, packed: Any, *, out: Tensor) -> Tensor: ...  # noqa: ANN401


class Argmax(Protocol):
    """logits [T, vocab]; out [T] int64: lowest id of the largest; -1 for a row with a NaN."""

    def __call__(self, logits: Tensor, *, out: Tensor) -> Tensor: ...


PROTOCOLS: dict[str, type] = {
    "rms_norm": RmsNorm,
    "add_rms_norm": AddRmsNorm,
    "rope": Rope,
    "kv_write": KvWrite,
    "rope_kv_write": RopeKvWrite,
    "attention_decode": AttentionDecode,
    "attention_prefill": AttentionPrefill,
    "silu_mul": SiluMul,
    "linear": Linear,
    "argmax": Argmax,
}


def check_bound(op: str, bound: object) -> BoundOp:
    """Return `bound` if it can be called as `op` is called.

    Raises:
        PluginLoadError: not a `BoundOp`, a `run` of another signature, or a workspace asked for
            with no way to receive it.
    """
    if not isinstance(bound, BoundOp):
        raise PluginLoadError(
            f"tvr_bind_{op} returned {type(bound).__name__}; it must return a BoundOp or None"
        )
    if (bound.workspace_bytes is None) != (bound.attach is None):
        raise PluginLoadError(f"{op}: workspace_bytes and attach must be given together")
    if bound.pack is not None and op != "linear":
        raise PluginLoadError(f"{op}: pack is for linear only")
    for name, args in (("plan", 1), ("workspace_bytes", 1), ("attach", 1), ("pack", 2)):
        function = getattr(bound, name)
        if function is not None:
            _check_call(op, name, function, [None] * args, {})
    wanted = list(inspect.signature(PROTOCOLS[op].__call__).parameters.values())[1:]
    positional = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY}
    optional = {p.name for p in wanted if p.default is not p.empty}
    found = _check_call(op, "run", bound.run, positional, keywords)
    _check_call(op, "run", bound.run, positional, {k: None for k in keywords if k not in optional})
    for param, name in zip(found.parameters.values(), positional, strict=False):
        if param.kind is param.POSITIONAL_OR_KEYWORD and param.name != name:
            raise PluginLoadError(
                f"{op}: run has {param.name!r} where the contract has {name!r}; its positional "
                f"arguments are ({', '.join(positional)})"
            )
    return bound


def _check_call(
    op: str,
    name: str,
    function: object,
    args: Sequence[object],
    kwargs: dict[str, None],
) -> inspect.Signature:
    """Return the signature of `function`; refuse one that these arguments do not fit."""
    if not callable(function):
        raise PluginLoadError(f"{op}: {name} is {type(function).__name__}, not a callable")
    try:
        found = inspect.signature(function)
        found.bind(*args, **kwargs)
    except (TypeError, ValueError) as e:
        wanted = [str(arg) for arg in args if arg is not None] + [f"{k}=..." for k in kwargs]
        call = ", ".join(wanted) or f"{len(args)} positional"
        raise PluginLoadError(f"{op}: {name} cannot be called as {name}({call}): {e}") from e
    return found
