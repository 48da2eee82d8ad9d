"""Run a model on token sequences over a paged cache, without scheduler or engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tvr.contract import StepMeta
from tvr.core.batch import ForwardBatch
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM


class PagedRun:
    """Sequences in a paged cache that was full of NaN, their blocks in random order.

    Args:
        model: the model.
        block_size: tokens in a block.
        num_blocks: blocks in the pool.
        first_position: absolute position of every sequence's first token.
        all_logits: compute those of every new token, or only of the last of each sequence.
        seed: of the order of blocks.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        block_size: int = 16,
        num_blocks: int = 64,
        first_position: int = 0,
        all_logits: bool = True,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.cache = KVCache.allocate(
            model.config, num_blocks, block_size, model.logits_dtype, model.device
        )
        for pair in self.cache.layers:
            for pool in pair:
                pool.fill_(torch.nan)
        self._block_size = block_size
        self._first_position = first_position
        self._all_logits = all_logits
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._blocks: dict[int, list[int]] = {}
        self._lens: dict[int, int] = {}

    def step(
        self,
        *,
        decode: Mapping[int, int] | None = None,
        prefill: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, Tensor]:
        """Compute one more token of some sequences and a chunk of others, in one step.

        Returns:
            For each sequence id the logits [n, vocab] of its new tokens, or of the last one.
        """
        chunks = [(i, [token]) for i, token in (decode or {}).items()]
        num_decodes = len(chunks)
        chunks += [(i, list(tokens)) for i, tokens in (prefill or {}).items()]
        batch = self._batch(chunks, num_decodes)
        hidden = self.model.forward(batch, self.cache)
        logits = self.model.compute_logits(hidden)
        parts = torch.split(logits, [len(t) if self._all_logits else 1 for _, t in chunks])
        return {i: part for (i, _), part in zip(chunks, parts, strict=True)}

    def _batch(self, chunks: list[tuple[int, list[int]]], num_decodes: int) -> ForwardBatch:
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for i, tokens in chunks:
            start = self._lens.get(i, 0)
            self._lens[i] = start + len(tokens)
            blocks = self._blocks.setdefault(i, [])
            while len(blocks) * self._block_size < self._lens[i]:
                blocks.append(self._free.pop())
            input_ids += tokens
            for at in range(start, self._lens[i]):
                positions.append(self._first_position + at)
                block, offset = divmod(at, self._block_size)
                slots.append(blocks[block] * self._block_size + offset)
        decodes, prefills = chunks[:num_decodes], chunks[num_decodes:]
        step = self._meta(chunks)
        last_rows = step.cu_seqlens_q[1:].long() - 1
        return ForwardBatch(
            input_ids=torch.tensor(input_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            step=step,
            decode=self._meta(decodes) if decodes else None,
            prefill=self._meta(prefills) if prefills else None,
            num_decode_tokens=num_decodes,
            logit_rows=torch.arange(len(input_ids)) if self._all_logits else last_rows,
        )

    def _meta(self, chunks: list[tuple[int, list[int]]]) -> StepMeta:
        blocks = [self._blocks[i] for i, _ in chunks]
        width = max(map(len, blocks))
        # Past a sequence's end the table is garbage by contract; this id is out of range.
        table = [ids + [2**31 - 1] * (width - len(ids)) for ids in blocks]
        q_lens = torch.tensor([0] + [len(tokens) for _, tokens in chunks])
        seq_lens = [self._lens[i] for i, _ in chunks]
        return StepMeta(
            block_table=torch.tensor(table, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            cu_seqlens_q=q_lens.cumsum(0).to(torch.int32),
            num_seqs=len(chunks),
            num_tokens=int(q_lens.sum()),
            max_q_len=int(q_lens.max()),
            max_seq_len=max(seq_lens),
            seq_lens_cpu=seq_lens,
        )
