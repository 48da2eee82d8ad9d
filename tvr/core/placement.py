"""Rows and blocks of the running sequences: who fits, who gets what, what comes back when."""

from __future__ import annotations

from collections import Counter

from tvr.core.block_manager import BlockManager
from tvr.core.in_flight import StepRecord
from tvr.core.sequence import Sequence, SequenceStatus


class Placement:
    """The running sequences and what they own.

    Args:
        blocks: the KV pool.
        num_rows: rows of the device tables.
        counts: the scheduler's.

    Attributes:
        running: by request id, in order of arrival.
        free_rows: rows that nobody owns and no step in flight names.
    """

    def __init__(self, blocks: BlockManager, num_rows: int, counts: Counter[str]) -> None:
        self.blocks = blocks
        self.counts = counts
        self.running: dict[str, Sequence] = {}
        self.free_rows = list(range(num_rows - 1, -1, -1))  # a stack: row 0 goes first
        self._num_growable = 0  # running sequences that may come to need more blocks

    def place(self, seq: Sequence, parent: Sequence | None) -> bool:
        """Give `seq` a row and the blocks of its whole prefill if it fits; it then runs.

        It fits if the free blocks cover all its known tokens, one block more, and one for each
        running sequence that can still grow. Without these, it could be admitted only to be
        preempted again before it got anywhere (vllm-project/vllm#25538).

        Args:
            seq: a sequence that does not run; a row must be free.
            parent: the live sequence whose prompt blocks it may share.
        """
        blocks = self.blocks
        spare = blocks.num_free - self._num_growable
        if seq.need_blocks > spare and not blocks.is_cached(seq.missing_key):
            return False  # as the last time: spares a waiting sequence a lookup in every step
        # Blocks that come from the cache come without logits.
        hit = blocks.lookup([] if seq.prompt_logits else seq.token_ids, seq.cache_salt)
        shared = max(hit.block_ids, self._prompt_blocks(parent, seq), key=len)
        num_blocks = -(-len(seq.token_ids) // blocks.block_size)
        # A shared block that nobody owns so far is taken from the free ones, too.
        num_unowned = sum(map(blocks.is_unused, shared))
        seq.need_blocks = min(num_blocks + 1, seq.max_blocks) - len(shared) + num_unowned
        seq.missing_key = hit.missing_key
        if seq.need_blocks > spare:
            return False
        blocks.acquire(shared)
        seq.block_ids = shared + blocks.allocate(num_blocks - len(shared))
        seq.num_scheduled = len(shared) * blocks.block_size
        seq.num_prefill = len(seq.token_ids)
        seq.num_published = len(hit.block_ids)
        seq.last_key = hit.last_key
        seq.row = self.free_rows.pop()
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = seq.num_scheduled
            if blocks.enable_prefix_caching and not seq.prompt_logits:
                self.counts["queried_tokens"] += seq.num_prompt_tokens
                self.counts["cached_tokens"] += seq.num_cached_tokens
        seq.status = SequenceStatus.RUNNING
        newest = next(reversed(self.running.values()), seq)
        self.running[seq.request_id] = seq
        if seq.arrival < newest.arrival:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].arrival))
        self._num_growable += num_blocks < seq.max_blocks
        return True

    def grow(self, seq: Sequence) -> int:
        """Give a running sequence one more block and return it; one must be free."""
        (block,) = self.blocks.allocate(1)
        seq.block_ids.append(block)
        self._num_growable -= len(seq.block_ids) == seq.max_blocks
        return block

    def remove(self, seq: Sequence, in_flight: StepRecord | None) -> None:
        """Take a running sequence's row and blocks; keep them held until `in_flight` is over."""
        del self.running[seq.request_id]
        self._num_growable -= len(seq.block_ids) < seq.max_blocks
        if in_flight is None:
            self.free_rows.append(seq.row)
        else:
            self.blocks.hold(seq.block_ids)
            in_flight.held.append((seq.row, seq.block_ids))
        self.blocks.release(seq.block_ids)
        seq.clear_place()

    def release_held(self, step: StepRecord) -> None:
        """Give back what was kept for a step in flight: it is over."""
        for row, block_ids in step.held:
            self.blocks.unhold(block_ids)
            self.free_rows.append(row)

    def written(self, seq: Sequence, end: int) -> None:
        """Note that the positions below `end` are in the pool; publish the blocks they fill."""
        if end == seq.num_prefill:
            seq.is_prefilled = True
        if not self.blocks.enable_prefix_caching:
            return
        size = self.blocks.block_size
        for index in range(seq.num_published, end // size):
            assert seq.last_key is not None
            tokens = seq.token_ids[index * size : (index + 1) * size]
            seq.last_key = self.blocks.publish(seq.block_ids[index], seq.last_key, tokens)
            seq.num_published = index + 1

    def _prompt_blocks(self, parent: Sequence | None, seq: Sequence) -> list[int]:
        """Return the full blocks of `parent`'s computed prompt that `seq` starts with, too."""
        if parent is None or not parent.is_prefilled or parent.cache_salt != seq.cache_salt:
            return []
        num_blocks = min(parent.num_prompt_tokens, len(seq.token_ids) - 1) // self.blocks.block_size
        end = num_blocks * self.blocks.block_size
        return (
            parent.block_ids[:num_blocks] if parent.token_ids[:end] == seq.token_ids[:end] else []
        )
