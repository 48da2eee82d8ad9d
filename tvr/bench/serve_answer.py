"""What came back of a request to a server, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of an answer that brings tokens.

    Attributes:
        at: seconds since the request was sent.
        total: tokens of the answer up to here, if the server says so.
        has_text: whether it brings text, too.
    """

    at: float
    total: int | None
    has_text: bool


@dataclass(kw_only=True)
class Answer:
    """What came of one request.

    Attributes:
        start: when it was sent, in seconds of `time.perf_counter`.
        queue_time: seconds for which it waited to be sent, since others were under way.
        chunks: what came, in order.
        prompt_tokens: by the server's count or, if it has none, as they were sent.
        usage: tokens of the answer by the server's count; None: it has none.
        error: why it failed; None: it did not.
        status: the HTTP status, if there was one.
    """

    start: float
    queue_time: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    usage: int | None = None
    error: str | None = None
    status: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; without the server's count, one for each chunk."""
        return len(self.chunks) if self.usage is None else self.usage

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunks[0].at

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.chunks[-1].at

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first; None: there is none."""
        more = self.output_tokens - 1
        return (self.latency - self.ttft) / more if more > 0 else None

    @property
    def arrivals(self) -> list[tuple[float, int]]:
        """When tokens came, and how many: seconds since the request was sent, tokens."""
        counts = tokens_of_chunks(self.chunks, self.output_tokens)
        return [(c.at, n) for c, n in zip(self.chunks, counts, strict=True) if n]

    @property
    def itls(self) -> list[float]:
        """Seconds between each token and the one before it.

        Tokens of one chunk share the time since the chunk before; those of the first chunk came
        together. So there is one for each token but the first, and their sum is what TPOT divides.
        """
        (before, first), *others = self.arrivals
        gaps = [0.0] * (first - 1)
        for at, count in others:
            gaps += [(at - before) / count] * count
            before = at
        return gaps


def tokens_of_chunks(chunks: Sequence[Chunk], num_tokens: int) -> list[int]:
    """Return how many tokens each chunk brings: as the server says, else spread evenly.

    Chunks without text come to nothing where there are more chunks than tokens.
    """
    totals = [chunk.total for chunk in chunks if chunk.total is not None]
    if len(totals) == len(chunks) and totals == sorted(totals) and totals[0] > 0:
        return [b - a for a, b in zip([0, *totals], totals, strict=False)]
    if num_tokens < len(chunks):
        return [int(chunk.has_text or i == 0) for i, chunk in enumerate(chunks)]
    share, more = divmod(num_tokens, len(chunks))
    return [share + (i >= len(chunks) - more) for i in range(len(chunks))]
