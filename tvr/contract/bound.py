"""Bound ops: what a bind hook returns, and what core gives it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvr.contract.protocols import PROTOCOLS
from tvr.contract.specs import SPECS, LinearSpec
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
        run: called in every layer; its signature is that of the op's Protocol.
        plan: called once a step before the layers, on the current stream, outside graph
            capture unless "plan_in_graph" is declared; may write only the workspace.
            `attention_decode` is given the step's decodes, `attention_prefill` its prefill
            chunks, any other op the whole step.
        workspace_bytes: bytes of workspace for the given bounds.
        attach: given the workspace ([n] uint8, zeroed, 256-byte aligned, fixed address) once,
            before the first `plan` or `run`. Needed with `workspace_bytes`.
        pack: `linear` and `fused_linear` only: turn `weight` [out, in] and `bias` ([out] or None)
            into the opaque `packed` that `run` is given. None: the pair `(weight, bias)`.
    """

    run: Callable[..., Any]
    plan: Callable[[StepMeta], None] | None = None
    workspace_bytes: Callable[[Bounds], int] | None = None
    attach: Callable[[Tensor], None] | None = None
    pack: Callable[[Tensor, Tensor | None], Any] | None = None


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
    if bound.pack is not None and not issubclass(SPECS[op], LinearSpec):
        raise PluginLoadError(f"{op}: pack is for linear and fused_linear only")
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
