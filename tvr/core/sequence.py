"""One request as the scheduler sees it: its tokens, its place on the device, its limits."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from numbers import Integral

from tvr.core.prefix_cache import BlockKey
from tvr.errors import RequestError


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; its tokens will be recomputed
    FINISHED = "finished"


class Sequence:
    """The tokens of one request and what the scheduler keeps about them.

    Positions count from 0. Token ids are opaque: they are only compared.

    Args:
        request_id: name, unique among the live sequences of a scheduler.
        prompt_token_ids: at least one token.
        max_tokens: most tokens to generate, at least 1; the context length may end it earlier.
        min_tokens: a stop token before this many generated tokens does not end the sequence.
        stop_token_ids: a generated token of this set ends the sequence (and is kept).
        max_lag: 1: may run one step ahead of its own results; 0: the host must see each token
            before the next one is scheduled.
        parent_id: the first sequence of the same request (n > 1), whose full prompt blocks this
            one shares.
        cache_salt: sequences share cached prefixes only with sequences of the same salt.
        priority: a whole number, smaller is more urgent; for policies that look at it.
        prompt_logits: logits of every position prefilled are wanted, so that no cached block will
            do. May be set to False once they are there.

    Attributes:
        arrival: counts up over the sequences that a scheduler took in.
        rank: its place among those that wait or prefill; () before the policy was asked.
        token_ids: prompt and generated tokens known to the host.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: prompt tokens found in the cache when it was first admitted.
        epoch: rises whenever results in flight go stale: at a preemption and at the end.
        row: row of the device tables, -1 while it has none.
        block_ids: KV blocks by block index.
        status: see `SequenceStatus`.
        finish_reason: None, "stop", "length", "abort" or "error".
        num_scheduled: positions below this are computed, or will be by a step in flight.
        num_prefill: positions below this are prefilled from known tokens; those from it on are
            decoded.
        is_prefilled: the step that computed the last prefill position has been updated.
        max_length: most tokens it can come to have, prompt included.
        max_blocks: most blocks it can come to need.
        need_blocks: free blocks that its last attempt at admission asked for.
        missing_key: the cache key whose absence ended its prefix hit at that attempt.
        num_bypassed: sequences admitted past it, ever, while it was first in line.
        last_step: the newest step that names it.
        fast_until: a decode below this position needs no decision of the scheduler.
        num_published: leading blocks known to the prefix cache.
        last_key: the cache's key of the last of these.
    """

    __slots__ = (
        "arrival",
        "block_ids",
        "cache_salt",
        "epoch",
        "fast_until",
        "finish_reason",
        "is_prefilled",
        "last_key",
        "last_step",
        "max_blocks",
        "max_lag",
        "max_length",
        "max_tokens",
        "min_tokens",
        "missing_key",
        "need_blocks",
        "num_bypassed",
        "num_cached_tokens",
        "num_prefill",
        "num_prompt_tokens",
        "num_published",
        "num_scheduled",
        "parent_id",
        "priority",
        "prompt_logits",
        "rank",
        "request_id",
        "row",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        max_lag: int = 1,
        parent_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        prompt_logits: bool = False,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = stop_token_ids
        self.max_lag = max_lag
        self.parent_id = parent_id
        self.cache_salt = cache_salt
        self.priority = priority
        self.prompt_logits = prompt_logits

        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.arrival = -1
        self.rank: tuple[float, ...] = ()
        self.epoch = 0
        self.num_cached_tokens = 0
        self.max_length = 0
        self.max_blocks = 0
        self.num_bypassed = 0
        self.last_step = -1
        self.clear_place()

    def set_limits(self, *, max_model_len: int, num_blocks: int, block_size: int) -> None:
        """Set `max_length` and `max_blocks` for a model and a pool.

        Raises:
            RequestError: it can never run there, or it has run already.
        """
        name, num_prompt = f"request {self.request_id!r}", self.num_prompt_tokens
        for field in ("max_tokens", "min_tokens", "max_lag", "priority"):
            if not isinstance(value := getattr(self, field), Integral):
                raise RequestError(f"{name}: {field} = {value!r}, must be a whole number")
        if not isinstance(self.cache_salt, str | None):
            raise RequestError(f"{name}: cache_salt = {self.cache_salt!r}, must be a text or None")
        if self.status is not SequenceStatus.WAITING:
            raise RequestError(f"{name} is {self.status.value} already: make a new Sequence")
        if not num_prompt:
            raise RequestError(f"{name}: the prompt is empty; it needs at least one token")
        if self.max_tokens < 1:
            raise RequestError(f"{name}: max_tokens = {self.max_tokens}, must be at least 1")
        if self.max_lag not in (0, 1):
            raise RequestError(f"{name}: max_lag = {self.max_lag}, must be 0 or 1")
        if num_prompt >= max_model_len:
            raise RequestError(
                f"{name}: a prompt of {num_prompt} tokens leaves no room to generate;"
                f" max_model_len = {max_model_len} allows {max_model_len - 1}"
            )
        self.max_length = min(num_prompt + self.max_tokens, max_model_len)
        # The last token is returned and never fed back: it needs no slot.
        self.max_blocks = -(-(self.max_length - 1) // block_size)
        if self.max_blocks > num_blocks:
            raise RequestError(
                f"{name} can never fit: {num_prompt} prompt tokens and up to"
                f" {self.max_length - num_prompt} new ones need {self.max_blocks} KV blocks of"
                f" {block_size}, the pool has {num_blocks}: lower max_tokens or enlarge the pool"
            )

    def clear_place(self) -> None:
        """Forget all that stands on the device; the tokens stay."""
        self.row = -1
        self.block_ids: list[int] = []
        self.num_scheduled = 0
        self.num_prefill = 0
        self.is_prefilled = False
        self.fast_until = 0
        self.need_blocks = 0
        self.missing_key: BlockKey | None = None
        self.num_published = 0
        self.last_key: BlockKey | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens known to the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens known to the host (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    def ends_with(self, token: int) -> str | None:
        """Return the finish reason if `token`, just appended, ends the sequence."""
        if token in self.stop_token_ids and self.num_output_tokens >= self.min_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_length else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt +"
            f" {self.num_output_tokens} tokens, row {self.row}, blocks {self.block_ids})"
        )
