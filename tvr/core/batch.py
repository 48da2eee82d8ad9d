"""A step's arrays, under the very names the kernels take.

The host packs what changed into one int32 array (`pack_step`), which crosses to the device in one
copy; there `DeviceTables.prepare_step` gathers the step's arrays in batch order: decodes first,
then prefill chunks, on one flat token axis. State that outlives a step (block table, last token)
stays on the device by row and is never rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from operator import add

import numpy as np
import torch
from torch import Tensor

from tvr.contract import StepMeta
from tvr.core.schedule_output import ScheduleOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """What the model computes in one step. T tokens, S sequences, R rows of logits.

    Attributes:
        input_ids, positions, slot_mapping: [T] int64.
        step: every sequence of the step; decode, prefill: its two parts, None if empty.
        num_decode_tokens: tokens `[:num_decode_tokens]` are the decodes.
        logit_rows: [R] int64, tokens whose hidden state reaches the LM head; None: all.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    step: StepMeta
    decode: StepMeta | None
    prefill: StepMeta | None
    num_decode_tokens: int
    logit_rows: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """One step as the host sends it.

    `data` is int32: rows [S], starts [S], q_lens [S], sampling entries [R], prefill token ids [P],
    then table updates as three runs of [U]: row, index in the row, block id. The lists repeat what
    the host needs to know of it without asking the device.
    """

    data: np.ndarray[tuple[int], np.dtype[np.int32]]
    num_seqs: int
    num_decodes: int
    num_samples: int
    num_prefill_tokens: int
    seq_lens: list[int]
    q_lens: list[int]
    sample_rows: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return self.num_decodes + self.num_prefill_tokens


def pack_step(
    output: ScheduleOutput, prefill_token_ids: Iterable[list[int]], next_index: list[int]
) -> PackedStep:
    """Return `output` packed for the device.

    Args:
        output: what the scheduler picked.
        prefill_token_ids: the token ids of each prefill chunk, in order.
        next_index: for each row, how many block ids its table row holds.

    Mutates: `next_index`.
    """
    decodes, chunks, num_decodes = output.decodes, output.chunks, output.num_decodes
    rows = decodes.rows + [e.row for e in chunks]
    starts = decodes.starts + [e.start for e in chunks]
    q_lens = [1] * num_decodes + [e.num_tokens for e in chunks]
    sampling = [i for i, e in enumerate(chunks, num_decodes) if e.samples]

    for reset in output.row_resets:
        next_index[reset.row] = 0
    table_rows: list[int] = []
    table_indices: list[int] = []
    table_blocks: list[int] = []
    for place, block in decodes.new_blocks.items():
        row = rows[place]
        table_rows.append(row)
        table_indices.append(next_index[row])
        table_blocks.append(block)
        next_index[row] += 1
    for e in chunks:
        first = next_index[e.row]
        next_index[e.row] = last = first + len(e.new_block_ids)
        table_rows += repeat(e.row, last - first)
        table_indices += range(first, last)
        table_blocks += e.new_block_ids

    prefill_ids = list(chain.from_iterable(prefill_token_ids))
    data = [*rows, *starts, *q_lens, *range(num_decodes), *sampling, *prefill_ids]
    data += table_rows + table_indices + table_blocks
    return PackedStep(
        data=np.array(data, dtype=np.int32),
        num_seqs=len(rows),
        num_decodes=num_decodes,
        num_samples=num_decodes + len(sampling),
        num_prefill_tokens=len(prefill_ids),
        seq_lens=list(map(add, starts, q_lens)),
        q_lens=q_lens,
        sample_rows=rows[:num_decodes] + [rows[i] for i in sampling],
    )


class DeviceTables:
    """State by row on the device.

    Attributes:
        block_table: [rows + 1, max_blocks] int32.
        last_token: [rows + 1] int64.
        spare_row: the last row, which belongs to no sequence: padding reads and writes it.
    """

    def __init__(
        self, *, num_rows: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        """Allocate the tables, zeroed.

        Args:
            num_rows: most sequences that hold a row at one time.
            max_model_len: tokens of the longest sequence.
            block_size: tokens in a KV block.
            device: where the model runs.
        """
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.spare_row = num_rows
        self.block_table = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def keep_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        """Let `tokens` [R] int64 be what the next steps of `rows` [R] int64 compute.

        A row without a valid logit gives -1, whose request will end; until then its next step may
        already be in flight and must not index the embedding with it.
        """
        self.last_token[rows] = tokens.clamp(min=0)

    def prepare_step(self, packed: PackedStep) -> tuple[ForwardBatch, Tensor]:
        """Return the step's arrays, and the rows [R] int64 that sample, in entry order.

        Mutates: `block_table`, by the step's new block ids.
        """
        num_seqs, num_decodes = packed.num_seqs, packed.num_decodes
        num_samples, num_tokens = packed.num_samples, packed.num_tokens
        host = torch.from_numpy(packed.data)
        if self.device.type != "cpu":
            host = host.pin_memory()
        sizes = [num_seqs] * 3 + [num_samples, packed.num_prefill_tokens]
        num_updates = (len(packed.data) - sum(sizes)) // 3
        data = host.to(self.device, non_blocking=True)
        rows, starts, q_lens, sampling, prefill_ids, *update = torch.split(
            data, [*sizes, num_updates, num_updates, num_updates]
        )
        if num_updates:
            table_rows, table_indices, block_ids = update
            self.block_table[table_rows.long(), table_indices.long()] = block_ids

        max_seq_len = max(packed.seq_lens)
        num_columns = -(-max_seq_len // self.block_size)
        rows = rows.long()
        block_table = self.block_table[:, :num_columns][rows]  # [S, columns]
        seq_lens = starts + q_lens  # [S]
        cu_seqlens_q = torch.zeros(num_seqs + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(q_lens, 0, dtype=torch.int32, out=cu_seqlens_q[1:])

        # [T] index of each token's sequence; output_size spares a device sync.
        seq_of_token = torch.repeat_interleave(
            torch.arange(num_seqs, device=self.device), q_lens, output_size=num_tokens
        )
        offset = torch.arange(num_tokens, device=self.device) - cu_seqlens_q[seq_of_token]
        positions = starts[seq_of_token] + offset  # [T] int64
        block_ids = block_table[seq_of_token, positions // self.block_size]
        # int64 before the product: slot numbers pass 2^31 in large pools.
        slot_mapping = block_ids.long() * self.block_size + positions % self.block_size
        input_ids = torch.cat((self.last_token[rows[:num_decodes]], prefill_ids.long()))

        def meta(first: int, last: int, cu_seqlens: Tensor) -> StepMeta | None:
            if first == last:
                return None
            lens = packed.seq_lens[first:last]
            q = packed.q_lens[first:last]
            return StepMeta(
                block_table=_aligned(block_table[first:last]),
                seq_lens=_aligned(seq_lens[first:last]),
                cu_seqlens_q=cu_seqlens,
                num_seqs=last - first,
                num_tokens=sum(q),
                max_q_len=max(q),
                max_seq_len=max(lens),
                seq_lens_cpu=lens,
            )

        step = meta(0, num_seqs, cu_seqlens_q)
        assert step is not None, "a scheduled step has at least one entry"
        sampling = sampling.long()
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            step=step,
            decode=meta(0, num_decodes, cu_seqlens_q[: num_decodes + 1]),
            # Prefill's running sum starts from 0 again: decodes are one token each.
            prefill=meta(num_decodes, num_seqs, cu_seqlens_q[num_decodes:] - num_decodes),
            num_decode_tokens=num_decodes,
            logit_rows=cu_seqlens_q[1:][sampling].long() - 1,
        )
        return batch, rows[sampling]


def _aligned(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy where its first byte is not on a 16-byte boundary."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
