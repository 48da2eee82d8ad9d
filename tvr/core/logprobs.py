"""Log-probabilities: computed on the device, carried to the host, and named for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tvr.core.draw import best_tokens
from tvr.core.outputs import Logprob

#: Stands for anything below it, -inf above all, which JSON cannot say.
LOGPROB_FLOOR = -9999.0


class RawLogprobs(NamedTuple):
    """One position's, on the host.

    Attributes:
        ids: the token that is there, then the likeliest tokens, best first.
        values: their log-probabilities.
        rank: of the first of them among all tokens, from 1.
    """

    ids: list[int]
    values: list[float]
    rank: int

    def named(self, text_of: Callable[[int], str | None]) -> dict[int, Logprob]:
        """Return them by token id, the token that is there first."""
        ranks = [self.rank, *range(1, len(self.ids))]
        named: dict[int, Logprob] = {}
        for token_id, value, rank in zip(self.ids, self.values, ranks, strict=True):
            if token_id not in named:
                named[token_id] = Logprob(value, rank, text_of(token_id))
        return named


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of r positions.

    Attributes:
        ids: [r, 1 + k] int64, the token that is there, then the k likeliest.
        values: [r, 1 + k] fp32, at least `LOGPROB_FLOOR`.
        ranks: [r] int64, of the token that is there.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, num_top: int) -> LogprobTensors:
        """Compute them from the model's own logits: nothing asked of sampling shows in them.

        Args:
            logits: [r, vocab] activation dtype.
            tokens: [r] int64, the token that is there; where it is -1 the row means nothing.
            num_top: how many of the likeliest tokens.
        """
        logprobs = logits.float().log_softmax(dim=-1)
        tokens = tokens.clamp(min=0)[:, None]  # [r, 1]
        own = logprobs.gather(1, tokens)
        # Among equals the lower id comes first, as everywhere.
        ids = torch.arange(logits.shape[1], device=logits.device)
        before = (logprobs > own) | ((logprobs == own) & (ids < tokens))
        ranks = before.sum(dim=-1) + 1
        values = own
        if num_top:
            best = logprobs.amax(dim=-1, keepdim=True)
            _, top = best_tokens(best - logprobs, min(num_top, logits.shape[1]))
            tokens = torch.cat((tokens, top), dim=1)
            values = torch.cat((own, logprobs.gather(1, top)), dim=1)
        return cls(tokens, values.clamp(min=LOGPROB_FLOOR), ranks)

    @classmethod
    def cat(cls, parts: Sequence[LogprobTensors]) -> LogprobTensors:
        """Return the rows of all `parts`, which have the same k."""
        return cls(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )

    def on_host(self, num_tops: list[int]) -> list[RawLogprobs]:
        """Return each row, cut to as many of the likeliest as were asked for; waits for them."""
        return [
            RawLogprobs(ids[: num_top + 1], values[: num_top + 1], rank)
            for ids, values, rank, num_top in zip(
                self.ids.tolist(), self.values.tolist(), self.ranks.tolist(), num_tops, strict=True
            )
        ]
