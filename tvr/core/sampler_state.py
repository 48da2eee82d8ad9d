"""What the sampler knows of every row: device tables, and their mirror on the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from tvr.contract.sampling_tables import SamplingTables
from tvr.core.device_copy import to_device, to_index
from tvr.core.logit_rules import LogitRules, RowRules, forbid
from tvr.core.sampling_params import SamplingParams

#: Where the count of a token in a row's output stops.
MOST_COUNTED = (1 << 14) - 1

#: The most tokens a row is cut down to by partial selection; beyond, its scores are sorted.
NARROW_WIDTH = 1024


class Kind(Enum):
    """What choosing a row's token takes."""

    GREEDY = auto()  # the largest logit
    PLAIN = auto()  # noise over the vocabulary
    NARROW = auto()  # the best k tokens, k up to NARROW_WIDTH
    NUCLEUS = auto()  # the best tokens of some mass
    WIDE = auto()  # the best k tokens, k beyond NARROW_WIDTH


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """The host's mirror of a row.

    Attributes:
        kind: what choosing its token takes.
        width: how many of the best tokens that has to look at; 0 where it is all.
        penalised: whether earlier tokens change its logits.
        rules: what it may have and what not; None: no rule.
        logprobs: how many log-probabilities are asked for; None: none at all.
    """

    kind: Kind = Kind.GREEDY
    width: int = 0
    penalised: bool = False
    rules: RowRules | None = None
    logprobs: int | None = None

    @property
    def adjusted(self) -> bool:
        """Whether the logits are changed before the choice."""
        return self.penalised or self.rules is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowState:
    """What a device row needs when a request takes it, first or again after preemption.

    Attributes:
        row: row of the tables.
        params: what the request asks for; its `n` and `seed` are not read.
        seed: int64, the seed of this completion.
        prompt_token_ids: the prompt, for its length and for the repetition penalty.
        output_token_ids: tokens generated so far.
        bad_words: token ids of the words that must not be generated.
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()


class SamplerState:
    """Sampling parameters and penalty counts by row; one row more is spare, for padding.

    Attributes:
        tables: what the `sample` op takes of them.
        prompt_lens: [rows + 1] int64, of the requests that have the rows.
        rules: what rows may not have.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Make the tables, every row greedy.

        Args:
            max_rows: rows that requests may have.
            vocab_size: tokens in the vocabulary.
            device: where the logits will be.
            eos_token_ids: the model's EOS ids; `min_tokens` keeps them from being generated.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows = [RowNeeds()] * max_rows
        self._special: set[int] = set()  # rows that need more than the argmax
        self._unusual: set[int] = set()  # rows that need more than the sample op
        self._with_logprobs: set[int] = set()
        self.rules = LogitRules(max_rows, vocab_size, self.device, eos_token_ids)

        def table(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((max_rows + 1,), value, dtype=dtype, device=self.device)

        self.prompt_lens = table(0, torch.int64)
        self.tables = SamplingTables(
            temperature=table(0.0),
            max_gap=table(math.inf),
            top_k=table(vocab_size, torch.int64),
            top_p=table(1.0, torch.float64),
            seeds=table(0, torch.int64),
            repetition=table(1.0),
            presence=table(0.0),
            frequency=table(0.0),
            counts=torch.zeros(max_rows + 1, vocab_size, dtype=torch.int16, device=self.device),
        )

    def reset(self, states: Sequence[RowState]) -> None:
        """Give rows to requests, new ones or resumed with output already made."""
        if not states:
            return
        whole, real = [], []  # numbers of each row by dtype: one copy each to the device
        for state in states:
            params = state.params
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
            self._note_needs(state, top_k)
            whole.append((state.row, len(state.prompt_token_ids), top_k, state.seed))
            real.append(
                (
                    0.0 if params.is_greedy else params.temperature,
                    -math.log(params.min_p) if params.min_p > 0 else math.inf,
                    params.top_p,
                    params.repetition_penalty,
                    params.presence_penalty,
                    params.frequency_penalty,
                )
            )
        rows, *integers = to_device(whole, self.device).unbind(dim=1)
        numbers = to_device(torch.tensor(real, dtype=torch.float64), self.device).unbind(dim=1)
        t = self.tables
        of_integers = (self.prompt_lens, t.top_k, t.seeds)
        of_numbers = (t.temperature, t.max_gap, t.top_p, t.repetition, t.presence, t.frequency)
        for tables, columns in ((of_integers, integers), (of_numbers, numbers)):
            for table, values in zip(tables, columns, strict=True):
                table.index_copy_(0, rows, values.to(table.dtype))
        for state in states:
            if state.params.has_penalties:
                self._rebuild_counts(state)

    def _note_needs(self, state: RowState, top_k: int) -> None:
        row, params = state.row, state.params
        rules = self.rules.reset(row, params, state.bad_words, state.output_token_ids)
        self._rows[row] = needs = self._needs_of(params, top_k, rules)
        for rows, is_in in (
            (self._unusual, rules is not None),
            (self._with_logprobs, needs.logprobs is not None),
            (self._special, needs.kind is not Kind.GREEDY or needs.adjusted),
        ):
            (rows.add if is_in else rows.discard)(row)

    def _needs_of(self, params: SamplingParams, top_k: int, rules: RowRules | None) -> RowNeeds:
        kind, width = Kind.PLAIN, 0
        if params.is_greedy:
            kind = Kind.GREEDY
        elif top_k < self.vocab_size:
            kind, width = (Kind.NARROW, top_k) if top_k <= NARROW_WIDTH else (Kind.WIDE, 0)
        elif params.top_p < 1:
            kind, width = Kind.NUCLEUS, min(NARROW_WIDTH, self.vocab_size)
        return RowNeeds(
            kind=kind,
            width=width,
            penalised=params.has_penalties,
            rules=rules,
            logprobs=params.logprobs,
        )

    def _rebuild_counts(self, state: RowState) -> None:
        prompt, output = (
            np.asarray(ids, dtype=np.int64)
            for ids in (state.prompt_token_ids, state.output_token_ids)
        )
        counted = np.bincount(output, minlength=self.vocab_size)
        counts = (2 * counted.clip(max=MOST_COUNTED)).astype(np.int16)
        counts[prompt] += 1  # once, however often it is there
        self.tables.counts[state.row].copy_(to_device(torch.from_numpy(counts), self.device))

    def output_positions(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the number [R] int64, from 0, of the output token that follows each position.

        Args:
            rows, positions: [R] int64, of the newest token of each row.
        """
        return positions + 1 - self.prompt_lens[rows]

    def needs(self, rows: Sequence[int]) -> list[RowNeeds]:
        """Return what each of `rows` takes, from the host's mirror."""
        return [self._rows[row] for row in rows]

    def is_greedy(self, rows: Sequence[int]) -> bool:
        """Return whether all of `rows` take the largest of the model's logits, and nothing else."""
        return not self._special or self._special.isdisjoint(rows)

    def is_usual(self, rows: Sequence[int]) -> bool:
        """Return whether the tables say all about `rows`: no rule has a say."""
        return not self._unusual or self._unusual.isdisjoint(rows)

    def wanted_logprobs(self, rows: Sequence[int]) -> list[int | None]:
        """Return how many of the likeliest each of `rows` wants; None: no logprobs. []: none do."""
        if not self._with_logprobs or self._with_logprobs.isdisjoint(rows):
            return []
        return [self._rows[row].logprobs for row in rows]

    def adjust(
        self,
        logits: Tensor,
        needs: Sequence[RowNeeds],
        rows: Tensor,
        positions: Tensor,
        allowed: Tensor | None,
    ) -> Tensor:
        """Return the logits that the choice is made from: rules first, then penalties.

        Args:
            logits: [r, vocab] fp32.
            needs: of each row.
            rows: [r] int64.
            positions: [r] int64, of the output token to choose.
            allowed: [r, ceil(vocab / 32)] int32, see `sample`.
        """
        logits = logits.clone() if allowed is None else forbid(logits, allowed)
        self.rules.apply(logits, [n.rules for n in needs], rows, positions)
        penalised = [i for i, n in enumerate(needs) if n.penalised]
        if penalised:
            index = to_index(penalised, len(needs), self.device)
            logits[index] = self.penalise(logits[index], rows[index])
        return logits

    def penalise(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return `logits` [r, vocab] fp32 of `rows` [r] with the rows' penalties applied.

        Repetition looks at prompt and output; presence and frequency at the output only.
        """
        t = self.tables
        counts = t.counts[rows]  # [r, vocab]
        repetition = t.repetition[rows, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(counts > 0, repeated, logits)
        logits = logits - t.frequency[rows, None] * (counts >> 1)
        return logits - t.presence[rows, None] * (counts > 1)

    def record(self, needs: Sequence[RowNeeds], rows: Tensor, tokens: Tensor) -> None:
        """Count `tokens` [r] int64 as output of `rows` [r] where later choices depend on it.

        A token of -1 is none. It runs on the device, so the next step sees the counts before the
        host has the tokens.
        """
        penalised = [i for i, n in enumerate(needs) if n.penalised]
        if penalised:
            index = to_index(penalised, len(needs), self.device)
            some, counted = rows[index], tokens[index]
            ids = counted.clamp(min=0)
            before = self.tables.counts[some, ids]
            more = (counted >= 0) & (before < 2 * MOST_COUNTED)
            self.tables.counts[some, ids] = before + 2 * more.to(torch.int16)
        watched = [i for i, n in enumerate(needs) if n.rules is not None and n.rules.bad_words]
        if watched:
            index = to_index(watched, len(needs), self.device)
            self.rules.record(rows[index], tokens[index])
