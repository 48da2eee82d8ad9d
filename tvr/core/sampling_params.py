"""What a request asks of sampling and of its end. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from tvr.errors import RequestError

#: A temperature below this samples greedily, as in vLLM: there is nothing left to chance.
GREEDY_BELOW = 1e-5

#: Most log-probabilities of a position; each costs a dict entry for every token.
MAX_LOGPROBS = 20

#: `(output_token_ids, logits [vocab]) -> logits [vocab]`, tensors of torch.
LogitsProcessor = Callable[[list[int], Any], Any]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    The filters apply in the order min_p, top_k, top_p, each on what the one before left, after
    penalties and temperature. Among equal logits the lower token id comes first. docs/sampling.md
    has the whole order.

    Attributes:
        n: completions of the prompt, 1 to 16384; completion i draws from `child_seed(seed, i)`.
        temperature: 0 to 1e6; divides the logits. 0 (or below 1e-5): the largest logit wins.
        top_p: above 0, to 1; keeps the fewest most likely tokens of at least this mass. 1: off.
        top_k: keeps the k most likely tokens. 0 or -1: off.
        min_p: 0 to 1; keeps tokens at least this likely relative to the likeliest. 0: off.
        seed: int64, fixes the random numbers. None: the engine draws one.
        max_tokens: most tokens to generate, at least 1. None: up to the context's end.
        min_tokens: no stop token is generated before this many tokens.
        stop: strings that end the text.
        stop_token_ids: token ids that end the request, besides the model's EOS ids.
        include_stop_str_in_output: keep the stop string at the text's end.
        ignore_eos: EOS ids are tokens like any other.
        repetition_penalty: 0.001 to 1000; of tokens in the prompt or the output, divides positive
            logits and multiplies others. 1: off.
        presence_penalty: -2 to 2; subtracted from the logit of every token in the output.
        frequency_penalty: -2 to 2; subtracted once for each time the token is in the output.
        logit_bias: added to the logits of these token ids; cut to -100 to 100. An id may be text
            of digits, which is all that a key in JSON can be.
        bad_words: texts that are not generated, at the beginning of a word and within one.
        allowed_token_ids: no other tokens are generated.
        logprobs: log-probabilities of this many of the likeliest tokens (0 to 20) and of the
            chosen one, for each new token. None: none.
        prompt_logprobs: the same for each token of the prompt but the first. The whole prompt is
            then computed, whatever the prefix cache holds.
        logits_processors: called in turn for each new token, see `LogitsProcessor`. The request
            then waits for each of its tokens before it computes the next.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: a value that is not allowed; one line naming field, value and what is.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_int("n", 1, 16384)
        self._check_number("temperature", 0, 1e6)
        self._check_number("top_p", 0, 1, above_low=True)
        self._check_int("top_k", -1)
        self._check_number("min_p", 0, 1)
        self._check_int("seed", -(1 << 63), (1 << 63) - 1, optional=True)
        self._check_int("max_tokens", 1, optional=True)
        self._check_int("min_tokens", 0)
        self._check_number("repetition_penalty", 0.001, 1000)
        self._check_number("presence_penalty", -2, 2)
        self._check_number("frequency_penalty", -2, 2)
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise self._error(name, "True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise self._error("min_tokens", f"at most max_tokens, {self.max_tokens}")
        self._check_stops()
        self._check_bias()
        self._check_list("bad_words", "strings that are not blank", _is_word)
        self._check_list("logits_processors", "callables", callable)

    def _check_stops(self) -> None:
        """Check both kinds of stop and keep copies: the caller may change the lists later."""
        stop = self.stop
        if stop is not None and not isinstance(stop, str | list | tuple):
            raise self._error("stop", "a string, a list of strings or None")
        # An empty string would match before the first token.
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise self._error("stop", "made of strings that are not empty")
        if stop is not None and not isinstance(stop, str):
            object.__setattr__(self, "stop", tuple(stop))
        self._check_ids("stop_token_ids")
        self._check_ids("allowed_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise self._error("allowed_token_ids", "None or name at least one token id")

    def _check_ids(self, name: str) -> None:
        ids = getattr(self, name)
        if ids is None:
            return
        if not isinstance(ids, list | tuple | set | frozenset):
            raise self._error(name, "a list of token ids or None")
        if not all(_is_id(token_id) for token_id in ids):
            raise self._error(name, "made of integers of at least 0")
        object.__setattr__(self, name, tuple(map(int, ids)))

    def _check_list(self, name: str, what: str, is_good: Callable[[object], bool]) -> None:
        values = getattr(self, name)
        if values is None:
            return
        if not isinstance(values, list | tuple) or not all(map(is_good, values)):
            raise self._error(name, f"a list of {what}, or None")
        object.__setattr__(self, name, tuple(values))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping) or not all(
            (_is_id(token_id) or _is_id_text(token_id))
            and _is_number(value)
            and value == value  # no NaN
            for token_id, value in bias.items()
        ):
            raise self._error("logit_bias", "a dict of token ids to numbers, or None")
        cut = {int(i): float(min(100, max(-100, value))) for i, value in bias.items()}
        object.__setattr__(self, "logit_bias", cut)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `RequestError` if a token id is outside the model's vocabulary."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} holds {token_id}; the model's token ids are 0 to {vocab_size - 1}"
                    )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, none to many."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit always wins."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def _check_int(
        self, name: str, low: int, high: int | None = None, *, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not _is_int(value) or value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise self._error(name, f"an integer {allowed}{' or None' if optional else ''}")
        object.__setattr__(self, name, int(value))  # numpy's integers wrap around

    def _check_number(self, name: str, low: float, high: float, *, above_low: bool = False) -> None:
        value = getattr(self, name)
        # Compared as it is: neither NaN nor an integer too large for a float gets through.
        if not _is_number(value) or not low <= value <= high or (above_low and value == low):
            allowed = f"above {low:g}, at most {high:g}" if above_low else f"{low:g} to {high:g}"
            raise self._error(name, f"a number {allowed}")
        object.__setattr__(self, name, float(value))

    def _error(self, name: str, allowed: str) -> RequestError:
        found = repr(getattr(self, name))
        shown = found if len(found) <= 80 else f"{found[:77]}..."
        return RequestError(f"{name} is {shown}; it must be {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return _is_int(value) and value >= 0  # type: ignore[operator]


def _is_id_text(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
