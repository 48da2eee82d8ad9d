"""The cells of all other ops, in the shape of Llama-3.2-1B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvr.bench.cells import RowsCell
from tvr.conformance.tensors import torch_dtype
from tvr.contract import (
    AddRmsNormSpec,
    ArgmaxSpec,
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
)

HIDDEN, INTERMEDIATE, VOCAB = 2048, 8192, 128256
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 64, 16


class Products(NamedTuple):
    """The sizes of a model's matrix products; `qkv` is that of queries, keys and values in one."""

    hidden: int
    qkv: int
    intermediate: int
    vocab: int

    @property
    def fused(self) -> tuple[tuple[int, int, dict[str, Any]], ...]:
        """(in_features, out_features) of qkv, o, gate_up and down, and what is fused with each."""
        return (
            (self.hidden, self.qkv, {"rms_norm": True}),
            (self.hidden, self.hidden, {"add": True}),
            (self.hidden, 2 * self.intermediate, {"rms_norm": True, "silu_mul": True}),
            (self.intermediate, self.hidden, {"add": True}),
        )

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in_features, out_features) of these and of the LM head."""
        return (*((n_in, n_out) for n_in, n_out, _ in self.fused), (self.hidden, self.vocab))


PRODUCTS = Products(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, INTERMEDIATE, VOCAB)
LINEARS = PRODUCTS.linears

#: What `prepare_step` reads and writes of a sequence, its block ids left out: 12 bytes from the
#: host, its last token, and five numbers.
PREPARED_BYTES = 12 + 8 + 4 * 8 + 4

#: Of `top_logprobs`: what is mostly asked for.
NUM_TOP = 5

#: Ops whose large cell is given in megabytes.
ELEMENTWISE = ("rms_norm", "add_rms_norm", "rope", "kv_write", "rope_kv_write", "silu_mul")
OPS = (*ELEMENTWISE, "linear", "fused_linear", "argmax", "prepare_step", "sample", "top_logprobs")

ROWS = (1, 8, 64, 256)
LINEAR_ROWS = (1, 2, 4, 8)
FUSED_ROWS = (1,)
MEGABYTES = 256

CPU_ROWS = (1, 8)
CPU_PRODUCTS = 2  # of a kind
CPU_MEGABYTES = 1


def op_cells(
    ops: Sequence[str],
    *,
    dtype: str,
    rows: Sequence[int] | None = None,
    megabytes: int | None = None,
    on_cpu: bool = False,
    products: Products = PRODUCTS,
) -> list[RowsCell]:
    """Return the cells of `ops`.

    Args:
        rows: None: those of a decode step; products have their own.
        megabytes: of the large cell of each elementwise op; 0: none; None: as usual.
        on_cpu: whether to be content with less.
        products: the sizes of `linear` and `fused_linear`.
    """
    if on_cpu:
        rows = rows or CPU_ROWS
    if megabytes is None:
        megabytes = CPU_MEGABYTES if on_cpu else MEGABYTES
    few = slice(CPU_PRODUCTS if on_cpu else None)
    cells = []
    for op in ops:
        if op == "linear":
            counts = rows or LINEAR_ROWS
            cells += [_linear(dtype, n, *shape) for shape in products.linears[few] for n in counts]
            continue
        if op == "fused_linear":
            counts = rows or FUSED_ROWS
            cells += [_fused(dtype, n, *product) for product in products.fused[few] for n in counts]
            continue
        cells += [_rows_cell(op, dtype, n) for n in rows or ROWS]
        if megabytes and op in ELEMENTWISE:
            cells.append(_rows_cell(op, dtype, max(1, megabytes * 10**6 // _row_bytes(op, dtype))))
    return cells


def _linear(dtype: str, rows: int, n_in: int, n_out: int) -> RowsCell:
    size = torch_dtype(dtype).itemsize
    return RowsCell(
        spec=LinearSpec(dtype=dtype, in_features=n_in, out_features=n_out, max_rows=rows),
        rows=rows,
        num_bytes=(n_in * n_out + rows * (n_in + n_out)) * size,
        num_flops=2 * rows * n_in * n_out,
        shape=(("in_features", n_in), ("out_features", n_out)),
    )


def _fused(dtype: str, rows: int, n_in: int, n_out: int, fused: dict[str, Any]) -> RowsCell:
    spec = FusedLinearSpec(
        dtype=dtype, in_features=n_in, out_features=n_out, max_rows=rows, **fused
    )
    # The residual is read besides.
    elements = n_in * n_out + rows * (n_in + spec.out_columns * (1 + spec.add))
    return RowsCell(
        spec=spec,
        rows=rows,
        num_bytes=elements * torch_dtype(dtype).itemsize,
        num_flops=2 * rows * n_in * n_out,
        shape=(("in_features", n_in), ("out_features", n_out), *((name, 1) for name in fused)),
    )


def _rows_cell(op: str, dtype: str, rows: int) -> RowsCell:
    spec, shape = _spec(op, dtype)
    num_bytes = rows * _row_bytes(op, dtype)
    return RowsCell(spec=spec, rows=rows, num_bytes=num_bytes, num_flops=0, shape=shape)


def _spec(op: str, dtype: str) -> tuple[OpSpec, tuple[tuple[str, int], ...]]:
    """Return an op's spec, and the sizes that name it."""
    kv = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    heads = {"num_heads": HEADS, **kv}
    paged = {"block_size": BLOCK_SIZE}
    kind, sizes = {
        "rms_norm": (RmsNormSpec, {"hidden_size": HIDDEN}),
        "add_rms_norm": (AddRmsNormSpec, {"hidden_size": HIDDEN}),
        "rope": (RopeSpec, heads),
        "kv_write": (KvWriteSpec, kv | paged),
        "rope_kv_write": (RopeKvWriteSpec, heads | paged),
        "silu_mul": (SiluMulSpec, {"intermediate_size": INTERMEDIATE}),
        "argmax": (ArgmaxSpec, {"vocab_size": VOCAB}),
        "prepare_step": (PrepareStepSpec, paged),
        "sample": (SampleSpec, {"vocab_size": VOCAB}),
        "top_logprobs": (TopLogprobsSpec, {"vocab_size": VOCAB, "num_top": NUM_TOP}),
    }[op]
    return kind(dtype=dtype, **sizes), tuple(sizes.items())


def _row_bytes(op: str, dtype: str) -> int:
    """Return the bytes that a row reads and writes."""
    if op == "prepare_step":
        return PREPARED_BYTES
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    elements = {
        "rms_norm": 2 * HIDDEN,
        "add_rms_norm": 4 * HIDDEN,
        "rope": 2 * (q + kv),
        "kv_write": 2 * 2 * kv,
        "rope_kv_write": (q + 2 * kv) + (q + kv) + 2 * kv,  # read; returned; stored
        "silu_mul": 3 * INTERMEDIATE,
        "argmax": VOCAB,
        "sample": VOCAB,
        "top_logprobs": VOCAB,
    }[op]
    return elements * torch_dtype(dtype).itemsize
