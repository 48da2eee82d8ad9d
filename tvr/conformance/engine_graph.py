"""Steps of a tiny model, captured in CUDA graphs once and replayed for other batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tvr.conformance import graphs
from tvr.conformance.engine_model import BOUNDS
from tvr.conformance.engine_run import PagedRun
from tvr.contract import StepMeta
from tvr.core.batch import ForwardBatch
from tvr.core.chunk_graphs import ChunkGraphs, padded

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.engine_model import TinyModel


class CapturedDecode:
    """Decodes of up to `num_rows` sequences of a run, by one graph.

    It is captured with padding rows alone and with the bounds for host integers. A replay finds
    its batch in the tensors it was captured on: whatever a backend took from the host, or from
    those tensors when it was captured, is wrong by then.
    """

    def __init__(self, run: PagedRun, num_rows: int) -> None:
        self._run = run
        block_size, device = run.model.spec.block_size, run.model.device

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        with run.model.on_device():
            max_blocks = BOUNDS.max_seq_len // block_size
            meta = StepMeta(
                block_table=filled(0, num_rows, max_blocks, dtype=torch.int32),
                seq_lens=filled(0, num_rows, dtype=torch.int32),
                cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
                num_seqs=num_rows,
                num_tokens=num_rows,
                max_q_len=1,
                max_seq_len=BOUNDS.max_seq_len,
                seq_lens_cpu=[BOUNDS.max_seq_len] * num_rows,
            )
            self._batch = ForwardBatch(
                input_ids=filled(0, num_rows),
                positions=filled(0, num_rows),
                slot_mapping=filled(-1, num_rows),
                step=meta,
                decode=meta,
                prefill=None,
                num_decode_tokens=num_rows,
                logit_rows=torch.arange(num_rows, device=device),
            )
            run.model.ops.plan(self._batch)
            # Eagerly first: what is allocated or compiled at a first call is so by then.
            self._logits = run.forward(self._batch).clone()
            self._graph = graphs.capture(self._launch, device, run.model.ops.stream)

    def step(self, tokens: Mapping[str, int]) -> dict[str, Tensor]:
        """Replay the graph for one more token of some sequences; see `PagedRun.step`."""
        batch, block_size = self._batch, self._run.model.spec.block_size
        with self._run.model.on_device():
            for tensor, padding in (
                (batch.input_ids, 0),
                (batch.positions, 0),
                (batch.slot_mapping, -1),
                (batch.step.seq_lens, 0),
                (self._logits, float("nan")),
            ):
                tensor.fill_(padding)
            for row, (name, token) in enumerate(tokens.items()):
                chunk = self._run.grow(name, [token])
                block, offset = divmod(chunk.start, block_size)
                batch.input_ids[row] = token
                batch.positions[row] = chunk.start
                batch.slot_mapping[row] = chunk.blocks[block] * block_size + offset
                batch.step.seq_lens[row] = chunk.end
                table = torch.tensor(chunk.blocks, dtype=torch.int32)
                batch.step.block_table[row, : len(table)] = table.to(self._run.model.device)
            self._run.model.ops.plan(batch)
            self._graph.replay()
            logits = self._logits.cpu()
        return {name: logits[row : row + 1] for row, name in enumerate(tokens)}

    def _launch(self) -> None:
        self._logits.copy_(self._run.forward(self._batch))


class ReplayedChunks(PagedRun):
    """A run whose steps with chunks are launched by the graphs that core has for such steps."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__(model)
        with model.on_device():
            model.llama.reserve(padded(BOUNDS).max_num_tokens)
            self._graphs = ChunkGraphs(
                model.llama,
                model.ops,
                self.pool,
                bounds=BOUNDS,
                max_blocks=BOUNDS.max_seq_len // model.spec.block_size,
            )
            for job in self._graphs.jobs():
                job.capture(lambda fn: graphs.capture(fn, model.device, model.ops.stream))

    def launch(self, batch: ForwardBatch) -> Tensor:
        assert self._graphs.holds(batch), "the steps of a check have chunks and are small"
        return self.model.llama.compute_logits(self._graphs.forward(batch))
