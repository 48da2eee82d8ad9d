"""Small steps with prefill chunks: their layers launched as one CUDA graph.

A graph has room for some decodes and, behind them, for the tokens of some chunks; what a step does
not fill is padding. The step's arrays are made as for any step and copied to where the graph reads
them; norm, LM head and the choice of tokens come behind it, for the rows that ask for them. Of
steps larger than every graph the device has so much to do that the host keeps up with it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvr.contract import Bounds, StepMeta
from tvr.core.batch import ForwardBatch
from tvr.core.graph_capture import Capture, Graph, GraphJob
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Room for decodes in a graph.
_DECODES = (0, 8, 32, 64, 128, 256)

#: Room for tokens of chunks, in a graph without decodes and in one with.
_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_TOKENS_BESIDE_DECODES = (64, 128, 256, 512, 1024, 2048)

#: Room for chunks.
_CHUNKS = 16


def padded(bounds: Bounds) -> Bounds:
    """Return the bounds of steps with their padding, for all steps within `bounds`."""
    decodes = _rooms(_DECODES, bounds.max_num_seqs)[-1]
    alone, beside = (
        _rooms(sizes, bounds.max_num_tokens)[-1] for sizes in (_TOKENS, _TOKENS_BESIDE_DECODES)
    )
    return replace(
        bounds,
        max_num_seqs=max(bounds.max_num_seqs, decodes + _CHUNKS),
        max_num_tokens=max(bounds.max_num_tokens, alone, decodes + beside),
    )


class ChunkGraphs:
    """The graphs of one model on one device.

    Args:
        model, ops, kv_cache: what a step runs on. Nothing of it may move.
        bounds: of all steps there are; `padded` has those of what the graphs run.
        max_blocks: of a sequence.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        ops: OpTable,
        kv_cache: KVCache,
        *,
        bounds: Bounds,
        max_blocks: int,
    ) -> None:
        self._model = model
        self._ops = ops
        self._kv_cache = kv_cache
        self._bounds = bounds
        self._plans_inside = ops.plans_in_graph(prefill=True)
        self._decodes = _rooms(_DECODES, bounds.max_num_seqs)
        self._chunks = _CHUNKS
        self._inputs = _Inputs(
            num_tokens=self._decodes[-1] + _TOKENS[-1],
            num_seqs=self._decodes[-1] + self._chunks,
            max_blocks=max_blocks,
            device=model.device,
        )
        self._tokens = {
            decodes: _rooms(_TOKENS_BESIDE_DECODES if decodes else _TOKENS, bounds.max_num_tokens)
            for decodes in self._decodes
        }
        self._graphs: dict[tuple[int, int], Graph] = {}

    def jobs(self) -> list[GraphJob]:
        """Return what captures the graphs, largest first."""
        return [
            GraphJob(
                f"a step of {decodes} decodes and {tokens} tokens of chunks",
                1,
                partial(self._capture, decodes, tokens),
            )
            for decodes in reversed(self._decodes)
            for tokens in reversed(self._tokens[decodes])
        ]

    def _capture(self, decodes: int, tokens: int, capture: Capture) -> None:
        batch = self._batch(decodes, tokens)
        self._inputs.clear(decodes, tokens)
        if not self._plans_inside:
            self._ops.plan(batch)
        self._run(batch)
        self._graphs[decodes, tokens] = capture(partial(self._run, batch))

    def __str__(self) -> str:
        decodes = self._decodes[-1]
        tokens = self._tokens[decodes][-1]
        return f"{tokens} tokens of {self._chunks} chunks beside {decodes} decodes"

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether there is a graph for a step; never for one without chunks."""
        return (
            batch.prefill is not None
            and batch.prefill.num_seqs <= self._chunks
            and self._room(batch.num_decode_tokens, batch.prefill.num_tokens) is not None
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """As the model's `forward`, plans included; a graph must hold the step."""
        assert batch.prefill is not None
        n = batch.num_decode_tokens
        room = self._room(n, batch.prefill.num_tokens)
        assert room is not None
        decodes, tokens = room
        self._inputs.load(batch, decodes, tokens)
        if not self._plans_inside:
            self._ops.plan(self._with_real_lengths(batch, decodes, tokens))
        self._graphs[room].replay()
        rows = batch.logit_rows
        assert rows is not None, "a step with chunks names its rows"
        moved = torch.where(rows < n, rows, rows + (decodes - n))
        return self._model.last_norm(decodes + tokens, moved)

    def _room(self, num_decodes: int, num_tokens: int) -> tuple[int, int] | None:
        place = bisect_left(self._decodes, num_decodes)
        if place == len(self._decodes):
            return None
        decodes = self._decodes[place]
        sizes = self._tokens[decodes]
        place = bisect_left(sizes, num_tokens)
        return (decodes, sizes[place]) if place < len(sizes) else None

    def _run(self, batch: ForwardBatch) -> None:
        if self._plans_inside:
            self._ops.plan(batch)
        self._model.run_layers(batch, self._kv_cache)

    def _batch(self, decodes: int, tokens: int) -> ForwardBatch:
        """Return the step of a graph; host integers are the bounds."""
        longest = self._bounds.max_seq_len
        return self._inputs.batch(
            decodes,
            tokens,
            self._chunks,
            max_q_len=min(tokens, self._bounds.max_q_len),
            decode_lens=[longest] * decodes,
            chunk_lens=[longest] * self._chunks,
        )

    def _with_real_lengths(self, batch: ForwardBatch, decodes: int, tokens: int) -> ForwardBatch:
        """Return the step of a graph with the host integers of `batch`; padding has length 0."""
        assert batch.prefill is not None
        decode_lens = [] if batch.decode is None else list(batch.decode.seq_lens_cpu)
        chunk_lens = list(batch.prefill.seq_lens_cpu)
        return self._inputs.batch(
            decodes,
            tokens,
            self._chunks,
            max_q_len=batch.prefill.max_q_len,
            decode_lens=decode_lens + [0] * (decodes - len(decode_lens)),
            chunk_lens=chunk_lens + [0] * (self._chunks - len(chunk_lens)),
        )


class _Inputs:
    """The arrays that graphs read, for so many tokens and sequences."""

    def __init__(
        self, *, num_tokens: int, num_seqs: int, max_blocks: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._input_ids = zeros(num_tokens)
        self._positions = zeros(num_tokens)
        self._slot_mapping = zeros(num_tokens)
        self._block_table = zeros(num_seqs, max_blocks, dtype=torch.int32)
        self._seq_lens = zeros(num_seqs, dtype=torch.int32)
        # Of decodes, of chunks, and of both, one after the other.
        self._decode_ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self._chunk_ends = zeros(num_seqs + 1, dtype=torch.int32)
        self._ends = zeros(num_seqs + 1, dtype=torch.int32)

    def clear(self, decodes: int, tokens: int) -> None:
        """Make all of it padding."""
        self._clear_tokens(decodes + tokens)
        self._end_chunks_at(self._decode_ends[:1], decodes)

    def load(self, batch: ForwardBatch, decodes: int, tokens: int) -> None:
        """Copy a step's arrays, and fill the rest with padding."""
        assert batch.prefill is not None
        self._clear_tokens(decodes + tokens)
        n = batch.num_decode_tokens
        for to, given in (
            (self._input_ids, batch.input_ids),
            (self._positions, batch.positions),
            (self._slot_mapping, batch.slot_mapping),
        ):
            _copy(to, given[:n], 0)
            _copy(to, given[n:], decodes)
        for meta, first in ((batch.decode, 0), (batch.prefill, decodes)):
            if meta is not None:
                columns = meta.block_table.shape[1]
                _copy(self._block_table[:, :columns], meta.block_table, first)
                _copy(self._seq_lens, meta.seq_lens, first)
        self._end_chunks_at(batch.prefill.cu_seqlens_q, decodes)

    def _clear_tokens(self, num_tokens: int) -> None:
        self._input_ids[:num_tokens].zero_()
        self._positions[:num_tokens].zero_()
        self._slot_mapping[:num_tokens].fill_(-1)
        self._seq_lens.zero_()

    def _end_chunks_at(self, ends: Tensor, decodes: int) -> None:
        """Set where chunks end: `ends` [chunks + 1] int32 from 0; padding, where the last does."""
        self._chunk_ends.copy_(ends[-1:].expand(len(self._chunk_ends)))
        _copy(self._chunk_ends, ends, 0)
        self._ends.copy_(self._decode_ends)  # a token each, as far as there are decodes
        behind = len(self._ends) - decodes
        torch.add(self._chunk_ends[:behind], decodes, out=self._ends[decodes:])

    def batch(
        self,
        decodes: int,
        tokens: int,
        chunks: int,
        *,
        max_q_len: int,
        decode_lens: Sequence[int],
        chunk_lens: Sequence[int],
    ) -> ForwardBatch:
        """Return a step of so many decodes, and of chunks with so many tokens in all."""
        num_tokens, num_seqs = decodes + tokens, decodes + chunks

        def meta(first: int, last: int, ends: Tensor, count: int, lens: Sequence[int]) -> StepMeta:
            return StepMeta(
                block_table=self._block_table[first:last],
                seq_lens=self._seq_lens[first:last],
                cu_seqlens_q=ends[: last - first + 1],
                num_seqs=last - first,
                num_tokens=count,
                max_q_len=max_q_len if last > decodes else 1,
                max_seq_len=max(lens),
                seq_lens_cpu=lens,
            )

        lens = [*decode_lens, *chunk_lens]
        return ForwardBatch(
            input_ids=self._input_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            step=meta(0, num_seqs, self._ends, num_tokens, lens),
            decode=meta(0, decodes, self._decode_ends, decodes, decode_lens) if decodes else None,
            prefill=meta(decodes, num_seqs, self._chunk_ends, tokens, chunk_lens),
            num_decode_tokens=decodes,
            logit_rows=None,
        )


def _copy(to: Tensor, given: Tensor, first: int) -> None:
    """Copy to the rows from `first` on."""
    if len(given):
        to[first : first + len(given)].copy_(given)


def _rooms(sizes: Sequence[int], most: int) -> list[int]:
    """Return the rising sizes up to the first that has room for `most`, if one has."""
    return list(sizes[: bisect_left(sizes, most) + 1])
