"""Random inputs of a case, rounded to its dtype, laid out as core lays them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance.row_tables import sample_args, step_args
from tvr.conformance.sequences import attention_call, random_sequences
from tvr.conformance.subject import Call
from tvr.conformance.tensors import torch_dtype, unfilled
from tvr.contract import (
    AddRmsNormSpec,
    ArgmaxSpec,
    AttentionSpec,
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

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case

EPS = 1e-5  # of the norms
MAX_POSITION = 1000  # rows of the angle table, exactly
_SPARE_BLOCKS = 3
_ROPE_THETA = 10000.0
_ROPE_FACTOR = 8.0


def make_call(case: Case, device: torch.device) -> Call:
    """Return the case's call with ordinary random inputs and NaN-filled outputs."""
    if isinstance(case.spec, AttentionSpec):
        return attention_call(case, random_sequences(case), device)
    g, dtype, rows = case.generator(), torch_dtype(case.spec.dtype), case.num_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype).to(device)

    def empty(*shape: int) -> Tensor:
        return unfilled(*shape, dtype=dtype, device=device)

    match case.spec:
        case AddRmsNormSpec(hidden_size=n):
            x, residual, weight = normal(rows, n), normal(rows, n), 1 + normal(n) / 4
            args = {"x": x, "residual": residual, "weight": weight, "eps": EPS}
            args |= {"out": empty(rows, n), "residual_out": empty(rows, n)}
        case RmsNormSpec(hidden_size=n):
            args = {"x": normal(rows, n), "weight": 1 + normal(n) / 4, "eps": EPS}
            args |= {"out": empty(rows, n)}
        case RopeSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim):
            args = {"q": normal(rows, heads, dim), "k": normal(rows, kv_heads, dim)}
            positions = torch.randint(MAX_POSITION, (rows,), generator=g)
            positions[:1] = MAX_POSITION - 1  # the table's last row
            args["positions"] = positions.to(device)
            args["cos_sin_cache"] = cos_sin_cache(case.spec.rotary_dim or dim).to(device)
            args |= {"q_out": empty(rows, heads, dim), "k_out": empty(rows, kv_heads, dim)}
            if isinstance(case.spec, RopeKvWriteSpec):
                args["v"] = normal(rows, kv_heads, dim)
                args |= _cache_args(case.spec, rows, g, device)
        case KvWriteSpec(num_kv_heads=kv_heads, head_dim=dim):
            args = {"k": normal(rows, kv_heads, dim), "v": normal(rows, kv_heads, dim)}
            args |= _cache_args(case.spec, rows, g, device)
        case SiluMulSpec(intermediate_size=n):
            args = {"x": 3 * normal(rows, 2 * n), "out": empty(rows, n)}
        case FusedLinearSpec(in_features=n_in, out_features=n_out, rms_norm=norm, add=add):
            args = {"x": normal(rows, n_in), "weight": normal(n_out, n_in)}
            args["bias"] = normal(n_out) if case.spec.bias else None
            args |= {"norm_weight": 1 + normal(n_in) / 4 if norm else None, "eps": EPS}
            args["residual"] = normal(rows, n_out) if add else None
            out_dtype = torch_dtype(case.spec.out_dtype or case.spec.dtype)
            args["out"] = empty(rows, case.spec.out_columns).to(out_dtype)
        case LinearSpec(in_features=n_in, out_features=n_out, bias=bias, out_dtype=out_dtype):
            args = {"x": normal(rows, n_in), "weight": normal(n_out, n_in)}
            args["bias"] = normal(n_out) if bias else None
            args["out"] = empty(rows, n_out).to(torch_dtype(out_dtype or case.spec.dtype))
        case ArgmaxSpec(vocab_size=n):
            args = {"logits": normal(rows, n), "out": torch.full((rows,), -7, device=device)}
        case PrepareStepSpec():
            args = _on(device, step_args(case.spec, rows, g))
        case SampleSpec(vocab_size=n):
            args = _on(device, sample_args(case.spec, 3 * normal(rows, n).cpu(), g))
        case TopLogprobsSpec(vocab_size=n, num_top=k):
            args = {"logits": 3 * normal(rows, n)}
            args["tokens"] = torch.randint(n, (rows,), generator=g).to(device)
            args["ids"] = torch.full((rows, 1 + k), -7, device=device)
            args["values"] = unfilled(rows, 1 + k, dtype=torch.float32, device=device)
            args["ranks"] = torch.full((rows,), -7, device=device)
        case _:
            raise NotImplementedError(case.op)
    return Call(spec=case.spec, args=args)


def spoil_rows(logits: Tensor) -> None:
    """Leave three rows of four of logits [R, vocab] without a finite best.

    In turn they get a NaN, an infinity, and nothing but -inf.
    """
    vocab = logits.shape[1]
    for i, row in enumerate(logits):
        if i % 4 == 0:
            row[i * 37 % vocab] = torch.nan
        elif i % 4 == 1:
            row[i * 37 % vocab] = torch.inf
        elif i % 4 == 2:
            row.fill_(-torch.inf)


def _on(device: torch.device, args: dict[str, Tensor]) -> dict[str, object]:
    return {name: x.to(device) for name, x in args.items()}


def cos_sin_cache(rotary_dim: int, max_position: int = MAX_POSITION) -> Tensor:
    """Return the table [max_position, rotary_dim] fp32: cos half, then sin half.

    The slower half of the frequencies is scaled down, as long-context checkpoints do: an op that
    makes angles of its own, from a theta, differs.
    """
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64)
    frequency = _ROPE_THETA ** (-2 * pair / rotary_dim)
    frequency[rotary_dim // 4 :] /= _ROPE_FACTOR
    angle = torch.arange(max_position, dtype=torch.float64).unsqueeze(1) * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def _cache_args(
    spec: KvWriteSpec | RopeKvWriteSpec, rows: int, g: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Caches full of random numbers and a distinct random slot for each row."""
    num_blocks = -(-rows // spec.block_size) + _SPARE_BLOCKS
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    kv_dtype = torch_dtype(spec.kv_dtype or spec.dtype)
    k_cache, v_cache = (torch.randn(shape, generator=g).to(kv_dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * spec.block_size, generator=g)[:rows]
    return {
        "k_cache": k_cache.to(device),
        "v_cache": v_cache.to(device),
        "slot_mapping": slots.to(device),
    }
