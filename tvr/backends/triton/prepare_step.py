"""The arrays of a step of decodes, from tables by row: one kernel."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, PrepareStepSpec


@triton.jit(do_not_specialize=["block_shift"])
def prepare_step_kernel(
    entries,
    block_table,
    last_token,
    input_ids,
    positions,
    rows,
    slot_mapping,
    seq_lens,
    step_block_table,
    entry_stride,
    table_stride,
    step_stride,
    block_shift,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program copies COLUMNS block ids of one sequence from its row of block_table.

    entries [S, 3] int32; block_table [rows, max_blocks], step_block_table [S, max_blocks] int32;
    all others are [rows] or [S]. The first program of a sequence makes what has one element for
    it, and stores its new block id, which the others must not wait to read.
    """
    seq = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    index = part * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    entries += seq * entry_stride
    row = tl.load(entries).to(tl.int64)
    start = tl.load(entries + 1)
    new_block = tl.load(entries + 2)
    position = tl.maximum(start, 0)
    column = position >> block_shift
    block_table += row * table_stride
    used = tl.where(start >= 0, column + 1, 0)
    inside = index < used
    ids = tl.load(block_table + index, mask=inside, other=0)
    ids = tl.where((index == column) & (new_block >= 0), new_block, ids)
    tl.store(step_block_table + seq * step_stride + index, ids, mask=inside)
    if part == 0:
        block = tl.load(block_table + column)
        block = tl.where(new_block >= 0, new_block, block)
        tl.store(block_table + column, new_block, mask=new_block >= 0)
        # 64 bits before the shift: slot numbers pass 2^31 in large pools.
        slot = (block.to(tl.int64) << block_shift) + (position - (column << block_shift))
        tl.store(input_ids + seq, tl.load(last_token + row))
        tl.store(positions + seq, position.to(tl.int64))
        tl.store(rows + seq, row)
        tl.store(slot_mapping + seq, tl.where(start >= 0, slot, -1))
        tl.store(seq_lens + seq, start + 1)


def bind_prepare_step(spec: PrepareStepSpec, gpu: Gpu) -> BoundOp:
    block_shift = spec.block_size.bit_length() - 1
    config = tuned("prepare_step", gpu.sm, Config(num_warps=4, blocks={"COLUMNS": 1024}))
    kernel = Kernel(gpu, prepare_step_kernel, config)
    columns = config.blocks["COLUMNS"]

    def run(
        entries: Tensor,
        block_table: Tensor,
        last_token: Tensor,
        *,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        step_block_table: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Make the arrays of S sequences; store new block ids in block_table [rows, max_blocks]."""
        outputs = (input_ids, positions, rows, slot_mapping, seq_lens, step_block_table)
        kernel(
            (len(entries), triton.cdiv(block_table.shape[1], columns)),
            entries,
            block_table,
            last_token,
            *outputs,
            entries.stride(0),
            block_table.stride(0),
            step_block_table.stride(0),
            block_shift,
        )
        return outputs

    return BoundOp(run=run)
