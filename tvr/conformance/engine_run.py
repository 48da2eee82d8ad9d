"""Sequences in a tiny model's paged pool, step by step as a check lays them out.

No scheduler and no engine, so a check says which blocks a sequence has, how its prompt is cut into
chunks and what shares a step with it; and every token's logits are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tvr.conformance.engine_model import TinyModel
from tvr.contract import StepMeta
from tvr.core.batch import ForwardBatch
from tvr.core.kv_cache import KVCache

if TYPE_CHECKING:
    from torch import Tensor

NUM_BLOCKS = 40

#: Stands in table entries past a sequence's end, which may hold anything.
_NO_BLOCK = 2**31 - 1


class Chunk(NamedTuple):
    """New tokens of one sequence, which stand behind `start` tokens in the cache."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PagedRun:
    """A pool of its own for one tiny model, and the sequences in it, by names the check gives.

    Args:
        model: what computes.
        block_seed: of the order in which blocks are handed out.
        unused: what the pool is filled with at first.

    Attributes:
        model: as given.
        pool: the K and V of all layers.
    """

    def __init__(
        self, model: TinyModel, *, block_seed: int = 0, unused: float = float("nan")
    ) -> None:
        self.model, self._block_size = model, model.spec.block_size
        with model.on_device():
            self.pool = KVCache.allocate(
                model.config, NUM_BLOCKS, self._block_size, model.spec.dtype, model.device
            )
            for caches in self.pool.layers:
                for cache in caches:
                    cache.fill_(unused)
        g = torch.Generator().manual_seed(block_seed)
        self._free: list[int] = torch.randperm(NUM_BLOCKS, generator=g).tolist()
        self._blocks: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}

    def step(
        self,
        *,
        decode: Mapping[str, int] | None = None,
        prefill: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Tensor]:
        """Compute one more token of some sequences and a chunk of others, in one step.

        Returns:
            For each sequence the logits [n, vocab] behind each of its new tokens, on the CPU.
        """
        decodes = {name: [token] for name, token in (decode or {}).items()}
        prefills = prefill or {}
        chunks = [self.grow(name, tokens) for name, tokens in [*decodes.items(), *prefills.items()]]
        with self.model.on_device():
            batch = self._batch(chunks, len(decodes))
            logits = self.launch(batch).cpu()
        parts = torch.split(logits, [len(chunk.tokens) for chunk in chunks])
        return dict(zip([*decodes, *prefills], parts, strict=True))

    def grow(self, name: str, tokens: Sequence[int]) -> Chunk:
        """Return more tokens of a sequence as a chunk, with blocks for all of them."""
        start, blocks = self._lens.get(name, 0), self._blocks.setdefault(name, [])
        self._lens[name] = start + len(tokens)
        while len(blocks) * self._block_size < self._lens[name]:
            blocks.append(self._free.pop())
        return Chunk(tokens, start, blocks)

    def launch(self, batch: ForwardBatch) -> Tensor:
        """Plan and launch a step, and return the logits of its rows, on the device."""
        self.model.ops.plan(batch)
        return self.forward(batch)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Launch a planned step and return the logits of its rows, on the device."""
        return self.model.llama.compute_logits(self.model.llama.forward(batch, self.pool))

    def forget(self, name: str) -> None:
        """Give a sequence's blocks back; they are the next to be handed out, in the same order."""
        self._free += reversed(self._blocks.pop(name))
        del self._lens[name]

    def share(self, name: str, parent: str, num_tokens: int) -> None:
        """Begin a sequence with the first tokens of another, in the same, full blocks."""
        assert num_tokens % self._block_size == 0, "only full blocks are shared"
        self._blocks[name] = self._blocks[parent][: num_tokens // self._block_size]
        self._lens[name] = num_tokens

    def cached(self, name: str, layer: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's K and V [n, KVH, D] in one layer, on the CPU."""
        token = torch.arange(self._lens[name])
        block = torch.tensor(self._blocks[name])[token // self._block_size]
        with self.model.on_device():
            k, v = (cache.cpu() for cache in self.pool.layers[layer])
        offset = token % self._block_size
        return k[block, :, offset], v[block, :, offset]

    def _batch(self, chunks: Sequence[Chunk], num_decodes: int) -> ForwardBatch:
        ids = [token for chunk in chunks for token in chunk.tokens]
        positions = [p for chunk in chunks for p in range(chunk.start, chunk.end)]
        slots = [
            chunk.blocks[p // self._block_size] * self._block_size + p % self._block_size
            for chunk in chunks
            for p in range(chunk.start, chunk.end)
        ]
        device = self.model.device
        return ForwardBatch(
            input_ids=torch.tensor(ids, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            step=self._meta(chunks),
            decode=self._meta(chunks[:num_decodes]) if num_decodes else None,
            prefill=self._meta(chunks[num_decodes:]) if chunks[num_decodes:] else None,
            num_decode_tokens=num_decodes,
            logit_rows=torch.arange(len(ids), device=device),
        )

    def _meta(self, chunks: Sequence[Chunk]) -> StepMeta:
        width = max(len(chunk.blocks) for chunk in chunks)
        table = [[*c.blocks, *[_NO_BLOCK] * (width - len(c.blocks))] for c in chunks]
        q_lens, kv_lens = [len(c.tokens) for c in chunks], [c.end for c in chunks]

        def int32(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.model.device)

        return StepMeta(
            block_table=int32(table),
            seq_lens=int32(kv_lens),
            cu_seqlens_q=int32([0, *itertools.accumulate(q_lens)]),
            num_seqs=len(chunks),
            num_tokens=sum(q_lens),
            max_q_len=max(q_lens),
            max_seq_len=max(kv_lens),
            seq_lens_cpu=kv_lens,
        )


def in_chunks(run: PagedRun, name: str, ids: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Prefill a sequence in chunks of these sizes, and return the logits of all its tokens."""
    edges = [0, *itertools.accumulate(sizes)]
    chunks = [ids[start:end] for start, end in itertools.pairwise(edges)]
    return torch.cat([run.step(prefill={name: chunk})[name] for chunk in chunks])


def token_by_token(run: PagedRun, name: str, ids: Sequence[int]) -> Tensor:
    """Decode a sequence's next tokens, and return the logits of all of them."""
    return torch.cat([run.step(decode={name: token})[name] for token in ids])


def prefill_and_decode(run: PagedRun, name: str, ids: Sequence[int]) -> Tensor:
    """Prefill all tokens but two, decode those, and return the logits of all."""
    return torch.cat(
        [in_chunks(run, name, ids, [len(ids) - 2]), token_by_token(run, name, ids[-2:])]
    )
