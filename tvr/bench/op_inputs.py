"""Inputs of every op but attention: several layers of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.inputs import EPS, cos_sin_cache
from tvr.conformance.row_tables import Asked, sample_args, step_args
from tvr.conformance.subject import Call
from tvr.conformance.tensors import torch_dtype
from tvr.contract import (
    AddRmsNormSpec,
    ArgmaxSpec,
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

    from tvr.bench.buffers import Buffers
    from tvr.bench.cells import RowsCell

#: What the rows of `sample` ask for.
_SAMPLED = Asked(temperature=0.8, top_p=0.95, repetition=1.1, presence=0.2, frequency=0.1)

#: Beyond all of some 10^12 normal numbers.
_LARGEST = 16.0

_FIRST_POSITION, _MAX_POSITION = 1000, 131072


def op_calls(cell: RowsCell, buffers: Buffers, num_sets: int) -> list[Call]:
    """Return one call for each of `num_sets` layers; what layers share, these share."""
    rows, dtype = cell.rows, torch_dtype(cell.spec.dtype)

    def normal(name: str, *shape: int) -> Tensor:  # one for each layer
        return buffers.normal(name, (num_sets, *shape), dtype)

    def empty(name: str, *shape: int) -> Tensor:
        return buffers.unfilled(name, (num_sets, *shape), dtype)

    own: dict[str, Tensor]
    shared: dict[str, Any] = {}
    match cell.spec:
        case RmsNormSpec(hidden_size=n):
            own = {"x": normal("x", rows, n), "out": empty("out", rows, n)}
            shared = {"weight": buffers.normal("weight", (n,), dtype), "eps": EPS}
            if isinstance(cell.spec, AddRmsNormSpec):
                own["residual"] = normal("residual", rows, n)
                own["residual_out"] = empty("residual_out", rows, n)
        case RopeSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim):
            # As in a model, q, k and v are slices of one buffer.
            qkv = normal("x", rows, heads + 2 * kv_heads, dim)
            own = {"q": qkv[:, :, :heads], "k": qkv[:, :, heads : heads + kv_heads]}
            own["q_out"] = empty("out", rows, heads, dim)
            own["k_out"] = empty("k_out", rows, kv_heads, dim)
            positions = torch.arange(rows, device=buffers.device) + _FIRST_POSITION
            positions %= _MAX_POSITION
            last = min(rows + _FIRST_POSITION, _MAX_POSITION)
            table = cos_sin_cache(dim, last).to(buffers.device)
            shared = {"positions": positions, "cos_sin_cache": table}
            if isinstance(cell.spec, RopeKvWriteSpec):
                own["v"] = qkv[:, :, heads + kv_heads :]
                shared["slot_mapping"] = _slots(rows, cell.spec.block_size, buffers)
                own |= _caches(cell.spec, rows, empty)
        case KvWriteSpec(num_kv_heads=kv_heads, head_dim=dim):
            kv = normal("x", rows, 2 * kv_heads, dim)
            own = {"k": kv[:, :, :kv_heads], "v": kv[:, :, kv_heads:]}
            own |= _caches(cell.spec, rows, empty)
            shared = {"slot_mapping": _slots(rows, cell.spec.block_size, buffers)}
        case SiluMulSpec(intermediate_size=n):
            own = {"x": normal("x", rows, 2 * n), "out": empty("out", rows, n)}
        case FusedLinearSpec(in_features=n_in, out_features=n_out):
            own = {"x": normal("x", rows, n_in), "weight": normal("weight", n_out, n_in)}
            own["out"] = empty("out", rows, cell.spec.out_columns)
            shared = {"bias": None, "norm_weight": None, "eps": EPS, "residual": None}
            if cell.spec.rms_norm:
                shared["norm_weight"] = buffers.normal("norm_weight", (n_in,), dtype)
            if cell.spec.add:
                own["residual"] = normal("residual", rows, n_out)
                del shared["residual"]
        case LinearSpec(in_features=n_in, out_features=n_out):
            own = {"x": normal("x", rows, n_in), "weight": normal("weight", n_out, n_in)}
            own["out"] = empty("out", rows, n_out)
            shared = {"bias": None}
        case ArgmaxSpec(vocab_size=n):
            # Of one row the gate sees two results. Random ones would let pass what searches half
            # of the vocabulary, one time in four: these are the last token, and the first of two.
            own = {"logits": normal("x", rows, n).clone()}
            own["logits"][:, 0, -1] = _LARGEST
            own["logits"][-1, 0, 0] = _LARGEST
            own["out"] = buffers.unfilled("ids", (num_sets, rows), torch.int64)
        case PrepareStepSpec():
            g = torch.Generator().manual_seed(rows)
            steps = [step_args(cell.spec, rows, g) for _ in range(num_sets)]
            own = {n: torch.stack([step[n] for step in steps]) for n in steps[0]}
            own = {n: x.to(buffers.device) for n, x in own.items()}
        case SampleSpec(vocab_size=n):
            g = torch.Generator().manual_seed(rows)
            args = sample_args(cell.spec, torch.empty(rows, 0), g, (_SAMPLED,))
            own = {"logits": normal("x", rows, n)}
            own["out"] = buffers.unfilled("ids", (num_sets, rows), torch.int64)
            shared = {name: x.to(buffers.device) for name, x in args.items() if name not in own}
        case TopLogprobsSpec(vocab_size=n, num_top=k):
            own = {"logits": normal("x", rows, n)}
            own["ids"] = buffers.unfilled("ids", (num_sets, rows, 1 + k), torch.int64)
            own["values"] = buffers.unfilled("values", (num_sets, rows, 1 + k), torch.float32)
            own["ranks"] = buffers.unfilled("ranks", (num_sets, rows), torch.int64)
            shared = {"tokens": torch.arange(rows, device=buffers.device) % n}
        case _:
            raise NotImplementedError(cell.spec.op)
    return [
        Call(spec=cell.spec, args={name: x[s] for name, x in own.items()} | shared)
        for s in range(num_sets)
    ]


def _caches(spec: KvWriteSpec | RopeKvWriteSpec, rows: int, empty: Any) -> dict[str, Tensor]:  # noqa: ANN401
    shape = (-(-rows // spec.block_size), spec.num_kv_heads, spec.block_size, spec.head_dim)
    return {name: empty(name, *shape) for name in ("k_cache", "v_cache")}


def _slots(rows: int, block_size: int, buffers: Buffers) -> Tensor:
    """Return the slots of a prompt: block after block in random order, tokens in theirs."""
    num_blocks = -(-rows // block_size)
    order = torch.randperm(num_blocks, generator=buffers.generator, device=buffers.device)
    token = torch.arange(rows, device=buffers.device)
    return order[token // block_size] * block_size + token % block_size
