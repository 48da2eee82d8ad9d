"""A text that the fp32 reference wrote, and how near an engine's logits come to its own.

An engine is led along the text by logits processors: they see the model's logits as they are, and
choose the text's next token whatever these say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from tvr.conformance.ledger import CheckFailed
from tvr.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.core.llm import LLM
    from tvr.core.outputs import RequestOutput


class Reading(NamedTuple):
    """What an engine made of one place of a text.

    Attributes:
        place: how many tokens of the answer came before.
        error: the largest error of a logit there; NaN if one is NaN.
        token: the likeliest token.
        gap: how much likelier the reference finds its own token than this one, in logits.
    """

    place: int
    error: float
    token: int
    gap: float


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and the greedy answer of the fp32 reference.

    Attributes:
        prompt, tokens: token ids.
        logits: [n, vocab] fp32, on the reference's device, those that each of `tokens` was chosen
            by.
    """

    prompt: list[int]
    tokens: list[int]
    logits: Tensor

    def up_to(self, place: int) -> list[int]:
        """Return the prompt and the first `place` tokens of the answer."""
        return self.prompt + self.tokens[:place]

    def gap(self, place: int, token: int) -> float:
        """Return how much larger the logit of the reference's own token is than that of another."""
        row = self.logits[place]
        return float(row[self.tokens[place]] - row[token])

    @property
    def smallest_gap(self) -> float:
        """By how much the likeliest token is ahead of the next one where it is closest."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


def write_text(reference: LLM, num_prompt: int, num_tokens: int, seed: int) -> Text:
    """Return what the reference answers to `num_prompt` random tokens.

    Raises:
        CheckFailed: it ended in an error.
    """
    rng = Random(seed)
    vocab_size = reference.parts.model_config.vocab_size
    prompt = [rng.randrange(vocab_size) for _ in range(num_prompt)]
    rows: list[Tensor] = []

    def keep(output_token_ids: list[int], logits: Tensor) -> Tensor:
        rows.append(logits.clone())
        return logits

    params = _greedy(num_tokens, keep)
    (output,) = generate(reference, [prompt], [params])
    return Text(prompt=prompt, tokens=output.outputs[0].token_ids, logits=torch.stack(rows))


def read_by_prefill(llm: LLM, text: Text) -> list[Reading]:
    """Return what an engine makes of each place if all before it is a prompt, many in a step.

    Raises:
        CheckFailed: a request ended in an error.
    """
    reader = _Reader(text)
    places = range(len(text.tokens))
    params = [_greedy(1, reader.starting_at(place)) for place in places]
    generate(llm, [text.up_to(place) for place in places], params)
    return reader.readings()


def read_by_decode(llm: LLM, text: Text, starts: Sequence[int]) -> list[Reading]:
    """Return what an engine makes of the places that it comes to token by token.

    Args:
        llm: the engine.
        text: the text.
        starts: for each sequence of the batch, how much of the answer is in its prompt.

    Raises:
        CheckFailed: a request ended in an error, or another token than the likeliest was taken.
    """
    reader = _Reader(text)
    num_tokens = len(text.tokens)
    params = [_greedy(num_tokens - start, reader.starting_at(start)) for start in starts]
    outputs = generate(llm, [text.up_to(start) for start in starts], params)
    for start, output in zip(starts, outputs, strict=True):
        found = output.outputs[0].token_ids
        if found != text.tokens[start:]:
            place = next(i for i, t in enumerate(found) if t != text.tokens[start + i])
            raise CheckFailed(
                f"token {found[place]} was chosen where {text.tokens[start + place]} has the "
                f"largest logit, {start + place} tokens into the answer"
            )
    return reader.readings()


def write_freely(llm: LLM, text: Text, starts: Sequence[int]) -> list[Reading]:
    """Return where an engine that nobody leads first leaves the text, for each sequence that does.

    Their `error` is unknown, and 0. This is the path that is timed: it runs ahead, and chooses on
    the device.

    Raises:
        CheckFailed: a request ended in an error.
    """
    params = [_greedy(len(text.tokens) - start) for start in starts]
    outputs = generate(llm, [text.up_to(start) for start in starts], params)
    readings = []
    for start, output in zip(starts, outputs, strict=True):
        for place, token in enumerate(output.outputs[0].token_ids, start):
            if token != text.tokens[place]:
                readings.append(Reading(place, 0.0, token, text.gap(place, token)))
                break  # from here on it is another text
    return readings


def generate(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Return the outputs of requests that all run to their length.

    Raises:
        CheckFailed: one ended otherwise; says why.
    """
    outputs = llm.generate(prompts, params)
    check_lengths(outputs)
    return outputs


def check_lengths(outputs: Sequence[RequestOutput]) -> None:
    """Raise CheckFailed if an answer ended before its length; says why."""
    for output in outputs:
        answer = output.outputs[0]
        if answer.finish_reason != "length":
            raise CheckFailed(answer.error or f"a request ended by {answer.finish_reason}")


class _Reader:
    """Collects readings; the numbers stay on the device until all are there."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._found: list[tuple[int, Tensor]] = []

    def starting_at(self, start: int) -> _Leader:
        return _Leader(self, start)

    def read(self, place: int, logits: Tensor) -> None:
        wanted = self._text.logits[place]
        token = logits.argmax()
        gap = wanted[self._text.tokens[place]] - wanted[token]
        error = (logits - wanted).abs().max()
        self._found.append((place, torch.stack([error, token.to(error.dtype), gap])))

    def forced(self, place: int, logits: Tensor) -> Tensor:
        """Return logits of which the text's token has the largest by far."""
        largest = logits.max()
        forced = logits.clone()
        forced[self._text.tokens[place]] = largest + largest.abs() + 1
        return forced

    def readings(self) -> list[Reading]:
        if not self._found:
            return []
        values = torch.stack([numbers for _, numbers in self._found]).tolist()
        return [
            Reading(place, error, int(token), gap)
            for (place, _), (error, token, gap) in zip(self._found, values, strict=True)
        ]


class _Leader:
    """Leads one sequence along the text, as a logits processor."""

    def __init__(self, reader: _Reader, start: int) -> None:
        self._reader = reader
        self._start = start

    def __call__(self, output_token_ids: list[int], logits: Tensor) -> Tensor:
        place = self._start + len(output_token_ids)
        self._reader.read(place, logits)
        return self._reader.forced(place, logits)


def _greedy(num_tokens: int, processor: object = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logits_processors=None if processor is None else [processor],  # type: ignore[list-item]
    )
