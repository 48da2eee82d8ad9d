"""Rows and blocks of the running sequences: who fits, who gets what, what comes back when."""

from __future__ import annotations

from tvr.core.block_manager import BlockManager, PrefixHit
from tvr.core.prefix_cache import BlockKey
from tvr.core.sequence import Sequence, SequenceStatus
from tvr.core.step_record import StepRecord


class Placement:
    """The running sequences and what they own.

    Args:
        blocks: the KV pool.
        num_rows: rows of the device tables.

    Attributes:
        running: by request id, in order of admission.
        free_rows: rows that nobody owns and no step in flight names.
    """

    def __init__(self, blocks: BlockManager, num_rows: int) -> None:
        self.blocks = blocks
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
        hit = self._find_prefix(seq, parent)
        num_hits = len(hit.block_ids)
        num_blocks = -(-len(seq.token_ids) // blocks.block_size)
        # A hit that nobody owns is taken from the free ones, too.
        num_unowned = sum(map(blocks.is_unused, hit.block_ids))
        seq.need_blocks = min(num_blocks + 1, seq.max_blocks) - num_hits + num_unowned
        seq.missing_key = hit.missing_key
        if seq.need_blocks > spare:
            return False
        blocks.acquire(hit.block_ids)
        seq.block_ids = hit.block_ids + blocks.allocate(num_blocks - num_hits)
        seq.num_scheduled = num_hits * blocks.block_size
        seq.num_prefill = len(seq.token_ids)
        seq.last_key = hit.last_key
        seq.row = self.free_rows.pop()
        if seq.status is SequenceStatus.WAITING:
            seq.num_cached_tokens = seq.num_scheduled
        seq.status = SequenceStatus.RUNNING
        self.running[seq.request_id] = seq
        self._num_growable += num_blocks < seq.max_blocks
        return True

    def grow(self, seq: Sequence) -> tuple[int, ...]:
        """Give a running sequence one more block; one must be free."""
        new_block_ids = tuple(self.blocks.allocate(1))
        seq.block_ids += new_block_ids
        self._num_growable -= len(seq.block_ids) == seq.max_blocks
        return new_block_ids

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

    def _find_prefix(self, seq: Sequence, parent: Sequence | None) -> PrefixHit:
        """Return the longest prefix at hand: in the cache, or in the parent's prompt blocks."""
        hit = self.blocks.lookup(seq.token_ids, seq.cache_salt)
        if parent is None or not parent.is_prefilled or parent.cache_salt != seq.cache_salt:
            return hit
        size = self.blocks.block_size
        num_shared = min(parent.num_prompt_tokens, len(seq.token_ids) - 1) // size
        end = num_shared * size
        if num_shared <= len(hit.block_ids) or parent.token_ids[:end] != seq.token_ids[:end]:
            return hit
        # The key chain starts anew: publishing walks over the shared blocks first.
        return PrefixHit(parent.block_ids[:num_shared], BlockKey.root(seq.cache_salt), None)
