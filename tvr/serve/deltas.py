"""What a step added to an answer, as plain values that other threads may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tvr.core.outputs import Logprob, RequestOutput

if TYPE_CHECKING:
    from tvr.serve.job import Job


class Delta(NamedTuple):
    """What one answer has grown by.

    Attributes:
        answer: which one, counted over all prompts of the client's request.
        text: new text.
        token_ids: new tokens.
        logprobs: one for each of them, if asked for.
        finish_reason, stop_reason, error: see `CompletionOutput`.
    """

    answer: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None

    def then(self, later: Delta) -> Delta:
        """Return this one and a later one of the same answer as one."""
        logprobs = None
        if self.logprobs is not None and later.logprobs is not None:
            logprobs = self.logprobs + later.logprobs
        return later._replace(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=logprobs,
        )


class Delivery(NamedTuple):
    """What a step brought for one prompt of a client's request.

    Attributes:
        job: the client's request.
        prompt: which of its prompts.
        output: the prompt's output. What is settled before the first token may be read: the
            prompt, its log-probabilities, its hits of the prefix cache.
        deltas: of its answers that have grown or ended; empty if the job does not stream.
        finished: all its answers have ended.
    """

    job: Job
    prompt: int
    output: RequestOutput
    deltas: list[Delta]
    finished: bool


def complete(delivery: Delivery) -> Delivery:
    """Return a finished delivery with all that its answers hold; may be called in any thread."""
    outputs = delivery.output.outputs
    first = delivery.prompt * len(outputs)
    deltas = [
        Delta(
            first + out.index,
            out.text,
            out.token_ids,
            out.logprobs,
            out.finish_reason,
            out.stop_reason,
            out.error,
        )
        for out in outputs
    ]
    return delivery._replace(deltas=deltas)


def merged(deliveries: list[Delivery]) -> list[Delivery]:
    """Return deliveries to one client with what successive steps gave to an answer as one delta.

    They pile up when the event loop is behind the engine, and then it has less to do.
    """
    by_prompt: dict[int, dict[int, Delta]] = {}
    latest: dict[int, Delivery] = {}
    for delivery in deliveries:
        deltas = by_prompt.setdefault(delivery.prompt, {})
        for delta in delivery.deltas:
            before = deltas.get(delta.answer)
            deltas[delta.answer] = delta if before is None else before.then(delta)
        latest[delivery.prompt] = delivery
    return [
        delivery._replace(deltas=list(by_prompt[prompt].values()))
        for prompt, delivery in latest.items()
    ]


@dataclass(slots=True)
class Progress:
    """How much of one answer has been handed over.

    Attributes:
        seen: tokens counted.
        seen_at: when the last of them came, in seconds of `time.monotonic()`.
        num_chars, num_tokens: handed over.
        ended: its end has been handed over.
    """

    seen: int = 0
    seen_at: float = 0.0
    num_chars: int = 0
    num_tokens: int = 0
    ended: bool = False


@dataclass(slots=True)
class Follower:
    """Who waits for the output of one request to the engine. Belongs to the engine's thread.

    Attributes:
        job: the client's request.
        prompt: which of its prompts.
        answers: one for each of the prompt's answers.
    """

    job: Job
    prompt: int
    answers: list[Progress] = field(default_factory=list)

    def delivery(self, output: RequestOutput) -> Delivery | None:
        """Return what is to be handed over now; who does not stream waits for the end.

        Then the output no longer changes, and whoever has it may read it.
        """
        if not self.job.streams:
            return Delivery(self.job, self.prompt, output, [], True) if output.finished else None
        deltas = []
        first = self.prompt * len(self.answers)
        for out, done in zip(output.outputs, self.answers, strict=True):
            if done.ended or (len(out.token_ids) == done.num_tokens and not out.finished):
                continue
            tokens = out.token_ids[done.num_tokens :]
            logprobs = None if out.logprobs is None else out.logprobs[done.num_tokens :]
            deltas.append(
                Delta(
                    first + out.index,
                    out.text[done.num_chars :],
                    tokens,
                    logprobs,
                    out.finish_reason,
                    out.stop_reason,
                    out.error,
                )
            )
            done.num_tokens += len(tokens)
            done.num_chars = len(out.text)
            done.ended = out.finished
        if not deltas:
            return None
        return Delivery(self.job, self.prompt, output, deltas, output.finished)
