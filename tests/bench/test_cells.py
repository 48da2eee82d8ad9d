"""Cells: which there are, and what is counted."""

from __future__ import annotations

import pytest

from tvr.bench.cells import attention_cells
from tvr.bench.op_cells import ELEMENTWISE, LINEARS, OPS, op_cells
from tvr.contract import OPS as ALL_OPS
from tvr.errors import ConfigError

SHAPE = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8}


def cells_of(
    *ops, head_dims=(64, 128), block_sizes=(16,), batches=None, ctxs=None, mixed=(), **shape
):
    sizes = {"head_dims": head_dims, "block_sizes": block_sizes, "batches": batches, "ctxs": ctxs}
    ops = [f"attention_{op}" for op in ops]
    return attention_cells(ops, **{**SHAPE, **shape}, **sizes, mixed=mixed)


def test_the_default_decodes_are_twelve_for_each_head_size():
    found = [(c.spec.head_dim, c.batch, c.ctx) for c in cells_of("decode")]
    sizes = [(1, n << 10) for n in (1, 8, 32, 128)] + [(8, 1 << 10), (8, 8 << 10)]
    sizes += [(n, k << 10) for n in (32, 64) for k in (1, 4)] + [(256, 1 << 10)]
    assert found == [(d, *size) for d in (64, 128) for size in [(1, 128), *sizes]]


def test_sizes_that_are_given_are_paired():
    given = cells_of("decode", "prefill", head_dims=(96,), batches=(1, 8), ctxs=(128, 256))
    found = [(c.spec.op.removeprefix("attention_"), c.batch, c.ctx) for c in given]
    pairs = [(1, 128), (1, 256), (8, 128), (8, 256)]
    assert found == [("decode", *p) for p in pairs] + [("prefill", 1, 128), ("prefill", 1, 256)]
    assert [(c.batch, c.ctx) for c in cells_of("decode", batches=(4,), head_dims=(64,))] == [
        (4, 8192)
    ]


def test_a_decode_reads_keys_and_values_once_and_q_and_writes_the_result():
    (cell,) = cells_of("decode", head_dims=(64,), batches=(8,), ctxs=(1024,))
    assert cell.num_bytes == 8 * (2 * 1024 * 8 + 2 * 32) * 64 * 2
    assert cell.num_flops == 2 * 2 * 8 * 32 * 64 * 1024


def test_a_decode_of_mixed_lengths_is_one_cell_that_counts_every_key():
    (cell,) = cells_of("decode", "prefill", head_dims=(64,), mixed=(1000, 16, 16))
    assert (cell.batch, cell.ctx, cell.seq_lens) == (3, 1000, [1000, 16, 16])
    assert cell.num_bytes == (2 * 1032 * 8 + 2 * 3 * 32) * 64 * 2
    assert cell.num_flops == 2 * 2 * 32 * 64 * 1032
    assert cell.fields["seq_lens"] == "1 x 1000 + 2 x 16"


def test_a_causal_prefill_counts_half_of_its_products():
    (cell,) = cells_of("prefill", head_dims=(128,), ctxs=(2048,))
    assert cell.num_bytes == 2048 * (2 * 8 + 2 * 32) * 128 * 2
    assert cell.num_flops == 4 * 32 * 128 * 2048 * 2048 // 2


def test_what_is_no_shape_is_refused_before_any_work():
    with pytest.raises(ConfigError, match="33 query heads"):
        cells_of("decode", num_heads=33)
    with pytest.raises(ConfigError, match="float8"):
        cells_of("decode", dtype="float8")


def test_every_op_but_attention_has_cells():
    assert sorted(OPS) == sorted(op for op in ALL_OPS if not op.startswith("attention"))
    assert {cell.spec.op for cell in op_cells(OPS, dtype="bfloat16")} == set(OPS)


def test_elementwise_ops_have_small_cells_and_one_of_so_many_megabytes():
    for op in ELEMENTWISE:
        *small, large = op_cells([op], dtype="bfloat16", megabytes=256)
        assert [cell.rows for cell in small] == [1, 8, 64, 256]
        assert 255e6 < large.num_bytes <= 256e6
    assert len(op_cells(["rope"], dtype="bfloat16", megabytes=0)) == 4


def test_linears_are_those_of_the_model_and_argmax_that_of_its_vocabulary():
    cells = op_cells(["linear"], dtype="bfloat16")
    assert len(cells) == 4 * len(LINEARS)
    one = cells[0]
    assert (one.rows, one.num_flops) == (1, 2 * 2048 * 3072)
    assert one.num_bytes == (2048 * 3072 + 2048 + 3072) * 2
    assert {cell.spec.max_rows for cell in cells} == {1, 2, 4, 8}
    (*_, last) = op_cells(["argmax"], dtype="float32")
    assert last.num_bytes == 256 * 128256 * 4
