"""What is measured: an op at one size, and what the best of kernels would have to move for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, TypeAlias

from tvr.conformance.tensors import torch_dtype
from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec, OpSpec

#: (sequences, tokens in the cache of each) of the table in docs/benchmarks.md.
DECODE_SIZES = (
    *((1, 128), (1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024)),
    *((8, 8192), (32, 1024), (32, 4096), (64, 1024), (64, 4096), (256, 1024)),
)
PREFILL_LENGTHS = (512, 2048, 8192, 32768)

#: What takes a CPU no longer than one would wait.
CPU_DECODE_SIZES = ((1, 128), (4, 256))
CPU_PREFILL_LENGTHS = (128,)

#: The other axis, where only one of batch and ctx is given.
DEFAULT_BATCH, DEFAULT_CTX = 1, 8192


@dataclass(frozen=True, kw_only=True)
class AttentionCell:
    """Attention of `batch` sequences of `ctx` tokens: the last of each, or in prefill all.

    Attributes:
        mixed: the lengths of a decode's sequences where they differ; `ctx` is the longest.
    """

    spec: AttentionDecodeSpec | AttentionPrefillSpec
    batch: int
    ctx: int
    mixed: tuple[int, ...] = ()

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence."""
        return list(self.mixed) or [self.ctx] * self.batch

    @property
    def num_tokens(self) -> int:
        """Rows of q."""
        return self.batch * (1 if isinstance(self.spec, AttentionDecodeSpec) else self.ctx)

    @property
    def num_bytes(self) -> int:
        """K and V once, q and the result."""
        s, size = self.spec, torch_dtype(self.spec.dtype).itemsize
        keys_and_values = 2 * sum(self.seq_lens) * s.num_kv_heads
        return (keys_and_values + 2 * self.num_tokens * s.num_heads) * s.head_dim * size

    @property
    def num_flops(self) -> int:
        """Two products; the causal mask leaves half of those of a prefill."""
        pairs = sum(self.seq_lens) * (self.num_tokens // self.batch)
        if isinstance(self.spec, AttentionPrefillSpec):
            pairs //= 2
        return 4 * self.spec.num_heads * self.spec.head_dim * pairs

    @property
    def fields(self) -> dict[str, Any]:
        """What a row of the report says of the cell."""
        s = self.spec
        shape = {"head_dim": s.head_dim, "num_heads": s.num_heads, "num_kv_heads": s.num_kv_heads}
        paged = {"block_size": s.block_size, "batch": self.batch, "ctx": self.ctx}
        mixed = {"seq_lens": self.lengths} if self.mixed else {}
        return {"op": s.op, "dtype": s.dtype, **shape, **paged, **mixed}

    @property
    def lengths(self) -> str:
        """The lengths in short: "64 x 4096", or "1 x 100000 + 63 x 512"."""
        runs = [(len(list(run)), n) for n, run in groupby(self.seq_lens)]
        return " + ".join(f"{count} x {n}" for count, n in runs)

    def __str__(self) -> str:
        return f"{self.spec.op} {self.lengths}, head_dim {self.spec.head_dim}"


@dataclass(frozen=True, kw_only=True)
class RowsCell:
    """An op on `rows` rows.

    Attributes:
        num_bytes: inputs and outputs, once each. Tables that are the same in every layer of a
            model (angles, positions, slots) are left out, as are the weights of norms.
        num_flops: 0 where nobody counts them.
        shape: the spec's sizes that name the cell.
    """

    spec: OpSpec
    rows: int
    num_bytes: int
    num_flops: int
    shape: tuple[tuple[str, int], ...]

    @property
    def fields(self) -> dict[str, Any]:
        """What a row of the report says of the cell."""
        named = {"op": self.spec.op, "dtype": self.spec.dtype}
        return {**named, **dict(self.shape), "rows": self.rows}

    def __str__(self) -> str:
        sizes = "".join(f", {name} {size}" for name, size in self.shape)
        return f"{self.spec.op} {self.rows} rows{sizes}"


Cell: TypeAlias = AttentionCell | RowsCell


def attention_cells(
    ops: Iterable[str],
    *,
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dims: Iterable[int],
    block_sizes: Iterable[int],
    batches: Sequence[int] | None,
    ctxs: Sequence[int] | None,
    mixed: tuple[int, ...] = (),
    on_cpu: bool = False,
) -> list[AttentionCell]:
    """Return the cells of "attention_decode" and "attention_prefill".

    Args:
        batches, ctxs: both None: the default sizes; else every pair. A prefill is of one
            sequence, and has the lengths `ctxs`.
        mixed: lengths of the sequences of one decode, instead.

    Raises:
        ConfigError: no spec can have these sizes.
    """
    decodes: Iterable[tuple[int, int]] = CPU_DECODE_SIZES if on_cpu else DECODE_SIZES
    lengths: Sequence[int] = CPU_PREFILL_LENGTHS if on_cpu else PREFILL_LENGTHS
    if batches or ctxs:
        decodes = list(product(batches or (DEFAULT_BATCH,), ctxs or (DEFAULT_CTX,)))
        lengths = ctxs or (DEFAULT_CTX,)
    if mixed:
        decodes, lengths = [(len(mixed), max(mixed))], ()
    sizes = {"attention_decode": list(decodes), "attention_prefill": [(1, n) for n in lengths]}
    specs: dict[str, type[AttentionDecodeSpec] | type[AttentionPrefillSpec]] = {
        "attention_decode": AttentionDecodeSpec,
        "attention_prefill": AttentionPrefillSpec,
    }
    return [
        AttentionCell(
            spec=specs[op](
                dtype=dtype,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_size=block_size,
            ),
            batch=batch,
            ctx=ctx,
            mixed=mixed,
        )
        for op, head_dim, block_size in product(ops, head_dims, block_sizes)
        for batch, ctx in sizes[op]
    ]
