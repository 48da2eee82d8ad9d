"""What the sampler knows of every row: device tables, and their mirror on the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from tvr.core.device_copy import to_device, to_index
from tvr.core.logit_rules import LogitRules, RowRules, forbid
from tvr.core.sampling_params import SamplingParams

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


class SamplerState:
    """Sampling parameters and penalty counts by row.

    Attributes:
        temperature: [rows] fp32; 1 in greedy rows.
        max_gap: [rows] fp32, -log(min_p): how far a token may be below the best.
        top_k: [rows] int64; the vocabulary's size where it is off.
        top_p: [rows] fp64; 1 where it is off.
        seeds: [rows] int64.
        repetition, presence, frequency: [rows] fp32 penalties.
        output_counts: [rows, vocab] int32, how often a row's output has each token.
        in_prompt: [rows, vocab] bool, whether its prompt has it. Both tables are empty until
            the first row with a penalty.
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
            max_rows: rows of every table.
            vocab_size: tokens in the vocabulary.
            device: where the logits will be.
            eos_token_ids: the model's EOS ids; `min_tokens` keeps them from being generated.
        """
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows = [RowNeeds()] * max_rows
        self._special: set[int] = set()  # rows that need more than the argmax
        self.rules = LogitRules(max_rows, vocab_size, self.device, eos_token_ids)
        self.temperature = torch.ones(max_rows, device=self.device)
        self.max_gap = torch.full((max_rows,), torch.inf, device=self.device)
        self.top_k = torch.full((max_rows,), vocab_size, device=self.device)
        self.top_p = torch.ones(max_rows, dtype=torch.float64, device=self.device)
        self.seeds = torch.zeros(max_rows, dtype=torch.int64, device=self.device)
        self.repetition = torch.ones(max_rows, device=self.device)
        self.presence = torch.zeros(max_rows, device=self.device)
        self.frequency = torch.zeros(max_rows, device=self.device)
        self.output_counts = torch.empty((0, vocab_size), dtype=torch.int32, device=self.device)
        self.in_prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=self.device)

    def reset(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Give `row` to a request, new or resumed with output already made.

        Args:
            row: row of the tables.
            params: what the request asks for; its `n` and `seed` are not read.
            seed: int64, the seed of this completion.
            prompt_token_ids: the prompt, for the repetition penalty.
            output_token_ids: tokens generated so far.
            bad_words: token ids of the words that must not be generated.
        """
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        rules = self.rules.reset(row, params, bad_words, output_token_ids)
        self._rows[row] = needs = self._needs_of(params, top_k, rules)
        if needs.kind is Kind.GREEDY and not needs.adjusted and needs.logprobs is None:
            self._special.discard(row)
        else:
            self._special.add(row)
        values = [
            (self.temperature, 1.0 if params.is_greedy else params.temperature),
            (self.max_gap, -math.log(params.min_p) if params.min_p > 0 else math.inf),
            (self.top_k, top_k),
            (self.top_p, params.top_p),
            (self.seeds, seed),
            (self.repetition, params.repetition_penalty),
            (self.presence, params.presence_penalty),
            (self.frequency, params.frequency_penalty),
        ]
        for table, value in values:
            table[row].fill_(value)  # `table[row] = value` would wait for the device
        if params.has_penalties:
            self._rebuild_counts(row, prompt_token_ids, output_token_ids)

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

    def _rebuild_counts(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if not len(self.output_counts):
            shape = (len(self._rows), self.vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        prompt_ids = to_device(prompt, self.device)
        output_ids = to_device(output, self.device)
        self.in_prompt[row].fill_(False)
        self.in_prompt[row].index_fill_(0, prompt_ids, True)
        self.output_counts[row].fill_(0)
        ones = torch.ones_like(output_ids, dtype=torch.int32)
        self.output_counts[row].index_add_(0, output_ids, ones)

    def needs(self, rows: Sequence[int]) -> list[RowNeeds]:
        """Return what each of `rows` takes, from the host's mirror."""
        return [self._rows[row] for row in rows]

    def is_greedy(self, rows: Sequence[int]) -> bool:
        """Return whether all of `rows` take the largest of the model's logits, and nothing else."""
        return self._special.isdisjoint(rows)

    def wanted_logprobs(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return (place in `rows`, number of likeliest tokens) where logprobs are wanted."""
        wanted = [(place, self._rows[row].logprobs) for place, row in enumerate(rows)]
        return [(place, num_top) for place, num_top in wanted if num_top is not None]

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
        counts = self.output_counts[rows]  # [r, vocab]
        seen = self.in_prompt[rows] | (counts > 0)
        repetition = self.repetition[rows, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        logits = logits - self.frequency[rows, None] * counts
        return logits - self.presence[rows, None] * (counts > 0)

    def record(self, needs: Sequence[RowNeeds], rows: Tensor, tokens: Tensor) -> None:
        """Count `tokens` [r] int64 as output of `rows` [r] where later choices depend on it.

        A token of -1 is none. It runs on the device, so the next step sees the counts before the
        host has the tokens.
        """
        penalised = [i for i, n in enumerate(needs) if n.penalised]
        if penalised:
            index = to_index(penalised, len(needs), self.device)
            counted = tokens[index]
            once = (counted >= 0).to(torch.int32)
            places = (rows[index], counted.clamp(min=0))
            self.output_counts.index_put_(places, once, accumulate=True)
        watched = [i for i, n in enumerate(needs) if n.rules is not None and n.rules.bad_words]
        if watched:
            index = to_index(watched, len(needs), self.device)
            self.rules.record(rows[index], tokens[index])
