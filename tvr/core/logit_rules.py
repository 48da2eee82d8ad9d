"""Which tokens a row may not have, and which it is pushed to: by id, by bad word, by bias."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tvr.core.device_copy import to_device, to_index
from tvr.core.sampling_params import SamplingParams

_INT64_MAX = (1 << 63) - 1
_NO_TOKEN, _ANY_TOKEN = -1, -2  # in the table of last tokens; in the beginning of a bad word


@dataclass(frozen=True, slots=True)
class RowRules:
    """The host's mirror of a row's rules.

    Attributes:
        restricted: the table of allowed tokens has something to say.
        bad_words: token ids of words of at least two tokens.
        min_tokens: tokens to generate before one of `early_stops` may be.
        early_stops: token ids.
        bias: token ids [b] int64 and what is added to their logits [b] fp32, on the device.
    """

    restricted: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    early_stops: tuple[int, ...] = ()
    bias: tuple[Tensor, Tensor] | None = None


class LogitRules:
    """Rules by row; tables are made for the first row that needs them.

    Attributes:
        allowed: [rows, ceil(vocab / 32)] int32; bit `id % 32` of word `id // 32` allows a token.
        last_tokens: [rows, w] int64, the newest last; -1 before the first output token.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, eos_token_ids: Collection[int]
    ) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        # A tokenizer may name one that the model has no logit for.
        self._eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)
        num_words = -(-vocab_size // 32)
        self.allowed = torch.empty((0, num_words), dtype=torch.int32, device=device)
        self.last_tokens = torch.empty((max_rows, 0), dtype=torch.int64, device=device)

    def reset(
        self,
        row: int,
        params: SamplingParams,
        bad_words: Sequence[tuple[int, ...]],
        output_token_ids: Sequence[int],
    ) -> RowRules | None:
        """Set a row's tables; return the host's mirror, None without any rule."""
        early_stops: set[int] = set()
        if params.min_tokens:
            early_stops.update(params.stop_token_ids or ())
            early_stops.update(() if params.ignore_eos else self._eos_token_ids)
        banned = [word[0] for word in bad_words if len(word) == 1]
        longer = tuple(word for word in bad_words if len(word) > 1)
        restricted = bool(banned) or params.allowed_token_ids is not None
        if restricted:
            self._restrict(row, params.allowed_token_ids, banned)
        if longer:
            self._rebuild_last_tokens(row, max(map(len, longer)) - 1, output_token_ids)
        bias = None
        if params.logit_bias:
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            bias = to_device(list(params.logit_bias), self._device), to_device(values, self._device)
        if not (restricted or longer or early_stops or bias):
            return None
        return RowRules(
            restricted=restricted,
            bad_words=longer,
            min_tokens=min(params.min_tokens, _INT64_MAX),  # any integer is allowed
            early_stops=tuple(sorted(early_stops)),
            bias=bias,
        )

    def _restrict(self, row: int, allowed: Sequence[int] | None, banned: list[int]) -> None:
        if not len(self.allowed):
            self.allowed = self.allowed.new_zeros((self._max_rows, self.allowed.shape[1]))
        bits = np.zeros(self.allowed.shape[1] * 32, dtype=np.uint8)
        bits[slice(self._vocab_size) if allowed is None else list(allowed)] = 1
        bits[banned] = 0
        words = np.packbits(bits, bitorder="little").view("<i4")
        self.allowed[row].copy_(to_device(torch.from_numpy(words), self._device))

    def _rebuild_last_tokens(self, row: int, width: int, output: Sequence[int]) -> None:
        more = width - self.last_tokens.shape[1]
        if more > 0:
            nothing = self.last_tokens.new_full((self._max_rows, more), _NO_TOKEN)
            self.last_tokens = torch.cat((nothing, self.last_tokens), dim=1)
        width = self.last_tokens.shape[1]
        last = [_NO_TOKEN] * width + list(output)
        self.last_tokens[row].copy_(to_device(last[-width:], self._device))

    def apply(
        self, logits: Tensor, rules: Sequence[RowRules | None], rows: Tensor, positions: Tensor
    ) -> None:
        """Apply the rules of `rows` [r] to `logits` [r, vocab] fp32. Mutates: `logits`.

        Args:
            logits: what to change.
            rules: of each row, from the host's mirror.
            rows: [r] int64.
            positions: [r] int64, of the output token to choose.
        """
        given = [(i, rule) for i, rule in enumerate(rules) if rule is not None]
        restricted = [i for i, rule in given if rule.restricted]
        if restricted:
            index = to_index(restricted, len(rules), self._device)
            logits[index] = forbid(logits[index], self.allowed[rows[index]])

        early = [(i, r.min_tokens, token) for i, r in given for token in r.early_stops]
        if early:
            batch_idx, min_tokens, ids = to_device(early, self._device).unbind(dim=1)  # [e] each
            _lower(logits, batch_idx, ids, positions[batch_idx] < min_tokens)

        width = self.last_tokens.shape[1]
        words = [
            (i, *[_ANY_TOKEN] * (width + 1 - len(word)), *word)
            for i, r in given
            for word in r.bad_words
        ]
        if words:
            table = to_device(words, self._device)  # [b, 1 + width + 1]
            batch_idx, begins, ids = table[:, 0], table[:, 1:-1], table[:, -1]
            last = self.last_tokens[rows[batch_idx]]  # [b, width]
            begun = ((begins == last) | (begins == _ANY_TOKEN)).all(dim=1)
            _lower(logits, batch_idx, ids, begun)

        biased = [(i, *r.bias) for i, r in given if r.bias is not None]
        if biased:
            batch_idx = to_device(
                [i for i, ids, _ in biased for _ in range(len(ids))], self._device
            )
            ids = torch.cat([ids for _, ids, _ in biased])
            logits[batch_idx, ids] += torch.cat([values for _, _, values in biased])

    def record(self, rows: Tensor, tokens: Tensor) -> None:
        """Remember `tokens` [r] int64 as the newest of `rows` [r].

        It runs on the device, so the next step sees them before the host does.
        """
        self.last_tokens[rows] = torch.cat((self.last_tokens[rows, 1:], tokens[:, None]), dim=1)


def forbid(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return `logits` [r, vocab] with -inf where the bit of `allowed` [r, words] int32 is 0."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    bits = (allowed.index_select(1, ids >> 5) >> (ids & 31)) & 1  # [r, vocab]
    return logits.masked_fill(bits == 0, -torch.inf)


def _lower(logits: Tensor, batch_idx: Tensor, ids: Tensor, where: Tensor) -> None:
    """Set `logits[batch_idx, ids]` to -inf `where` it holds; pairs may repeat."""
    change = torch.where(where, -torch.inf, 0.0).to(logits.dtype)
    logits.index_put_((batch_idx, ids), change, accumulate=True)
