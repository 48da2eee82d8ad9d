"""Backends for the shadow: the reference under another name, and with single ops replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from tvr.backends.torch_ref import plugin
from tvr.conformance.snapshot import call_of
from tvr.contract import BackendInfo, BoundOp
from tvr.hookspecs import hookimpl

REFERENCE = plugin.tvr_backend_info()


def backend_of(
    binds: Mapping[str, Callable[..., BoundOp]], name: str = "mine", **hooks: Any
) -> SimpleNamespace:
    """Return a backend that declares what the reference does for the ops of `binds`.

    Args:
        binds: op -> a function of (spec, bound), the reference's, that returns what to bind.
        name: of the backend.
        hooks: attributes to set besides.
    """
    info = BackendInfo(name=name, abi=(1, 0), ops={op: REFERENCE.ops[op] for op in binds})
    backend = SimpleNamespace(tvr_backend_info=hookimpl(lambda: info), **hooks)
    for op, make in binds.items():
        setattr(backend, f"tvr_bind_{op}", _hook(op, make))
    return backend


def _hook(op: str, make: Callable[..., BoundOp]) -> Any:
    @hookimpl
    def bind(spec, device):
        bound = getattr(plugin, f"tvr_bind_{op}")(spec=spec, device=device)
        return make(spec, bound)

    return bind


def right(spec: Any, bound: BoundOp) -> BoundOp:
    """Bind what the reference binds."""
    return bound


def after(spoil: Callable[..., None], *, call: int = 0) -> Callable[..., BoundOp]:
    """Return what binds the reference's op, with `spoil(args)` after its call number `call`.

    Calls are counted from 0 over all that is bound. `args` are the call's arguments by name.
    """
    seen: list[int] = []

    def make(spec, bound):
        def run(*args, **kwargs):
            result = bound.run(*args, **kwargs)
            seen.append(1)
            if len(seen) == call + 1:
                packed = {"packed": args[1]} if spec.op == "linear" else {}
                spoil({**call_of(spec, args, kwargs).args, **packed})
            return result

        return replace(bound, run=run)

    return make


# --- other ways to the same results: computed in fp64 or by torch's own attention --------------


def _norm(x, weight, *, eps, out):
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return out.copy_(normed.to(x.dtype).double() * weight.double())


def _add_norm(x, residual, weight, *, eps, out, residual_out):
    residual_out.copy_(x.double() + residual.double())
    return _norm(residual_out, weight, eps=eps, out=out), residual_out


def _rope(q, k, positions, cos_sin_cache, *, q_out, k_out):
    cos, sin = cos_sin_cache[positions].double().unsqueeze(1).chunk(2, -1)
    for x, out in ((q, q_out), (k, k_out)):
        a, b = x.double().chunk(2, -1)
        out.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    return q_out, k_out


def _silu_mul(x, *, out):
    gate, up = x.double().chunk(2, -1)
    return out.copy_(gate / (1 + torch.exp(-gate)) * up)


def _linear(x, packed, *, out):
    weight_t, bias = packed
    product = x.double() @ weight_t.double()
    return out.copy_(product if bias is None else product + bias.double())


def _attend(q, k_cache, v_cache, table, kv_len, scale, out):
    ids = table[: -(-kv_len // k_cache.shape[2])].long()
    k, v = (
        c[ids].transpose(1, 2).flatten(0, 1)[:kv_len].transpose(0, 1) for c in (k_cache, v_cache)
    )
    mask = torch.ones(len(q), kv_len, dtype=torch.bool).tril(kv_len - len(q))
    heads = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    out.copy_(heads[0].transpose(0, 1))


def _decode(q, k_cache, v_cache, step, *, scale, out, lse=None):
    for s, kv_len in enumerate(step.seq_lens_cpu):
        row = slice(s, s + 1)
        _attend(q[row], k_cache, v_cache, step.block_table[s], kv_len, scale, out[row])
    return out


def _prefill(q, k, v, k_cache, v_cache, step, *, scale, out, lse=None):
    edges = step.cu_seqlens_q.tolist()
    for s, kv_len in enumerate(step.seq_lens_cpu):
        rows = slice(edges[s], edges[s + 1])
        _attend(q[rows], k_cache, v_cache, step.block_table[s], kv_len, scale, out[rows])
    return out


def _transposed(weight, bias):
    return weight.t().contiguous(), bias


OTHER_WAYS: dict[str, Callable[..., BoundOp]] = {
    op: lambda spec, bound, run=run: BoundOp(run=run)
    for op, run in {
        "rms_norm": _norm,
        "add_rms_norm": _add_norm,
        "rope": _rope,
        "silu_mul": _silu_mul,
        "attention_decode": _decode,
        "attention_prefill": _prefill,
    }.items()
} | {"linear": lambda spec, bound: BoundOp(run=_linear, pack=_transposed)}
