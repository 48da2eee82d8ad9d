"""What a request gives back: plain data, standard library only, under vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload


class Logprob(NamedTuple):
    """How likely the model finds a token in its place, before any sampling parameter.

    Attributes:
        logprob: natural logarithm of the probability, at least -9999.0 (for -inf, too).
        rank: 1 for the likeliest token.
        decoded_token: its text by itself; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]


class LogprobSource(Protocol):
    """Makes the log-probabilities of an answer so far: one list, which grows."""

    def named(self) -> Logprobs: ...


class _MadeWhenRead:
    """The field `logprobs`: it may be given what makes the list, which then waits for a reader.

    To make a dict for each token as it comes would take a host longer than all else.
    """

    @overload
    def __get__(self, output: None, owner: object = None) -> None: ...

    @overload
    def __get__(self, output: CompletionOutput, owner: object = None) -> Logprobs | None: ...

    def __get__(self, output: CompletionOutput | None, owner: object = None) -> Logprobs | None:
        if output is None:
            return None  # what the field is if nothing is given
        given: Logprobs | LogprobSource | None = vars(output)["logprobs"]
        return given if given is None or isinstance(given, list) else given.named()

    def __set__(self, output: CompletionOutput, given: Logprobs | LogprobSource | None) -> None:
        vars(output)["logprobs"] = given


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic()`; None: not yet.

    Attributes:
        arrival_time: the engine took the request.
        first_scheduled_time: its first step was sent to the device.
        first_token_time: the host knew the first new token.
        finished_time: the last of its answers ended.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class CompletionOutput:
    """One answer to a request. Grows in place while the request runs.

    Attributes:
        index: which of the request's n answers.
        text: the text so far; never ends inside a character or inside a possible stop string.
        token_ids: every new token the model gave, in order, those without text included. Its
            length is the number of tokens used: re-encoding `text` may give another number.
        cumulative_logprob: sum of the tokens' log-probabilities, if `logprobs` were asked for.
        logprobs: for each token, if asked for, the log-probabilities by token id: of the token
            itself, then of the likeliest ones. It is brought up to date when this is read.
        finish_reason: None while running, then "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended it; None for an EOS token.
        error: what went wrong, with finish_reason "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: _MadeWhenRead = _MadeWhenRead()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def append(self, token_id: int, text: str) -> None:
        """Add one token and the text it released."""
        self.token_ids.append(token_id)
        if text:
            # As `append_text`, without the cost of a call for every token.
            grown, self.text = self.text, ""
            grown += text
            self.text = grown

    def append_text(self, text: str) -> None:
        """Add text at a cost that does not grow with the text there is."""
        # CPython extends a string in place only if a local variable is its sole owner, so the
        # attribute lets go of it first; `self.text += text` would copy all of it every time.
        grown, self.text = self.text, ""
        grown += text
        self.text = grown

    @property
    def finished(self) -> bool:
        """Whether this answer has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers.

    Attributes:
        request_id: the user's id, or the one the engine gave.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: the n answers.
        finished: all of them have ended.
        metrics: times.
        num_cached_tokens: prompt tokens found in the prefix cache instead of being computed.
        prompt_logprobs: for each prompt token, if asked for, as `CompletionOutput.logprobs`; None
            for the first, which nothing comes before. There with the first new token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
