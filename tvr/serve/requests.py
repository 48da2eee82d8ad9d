"""What clients may ask for: the fields of each route's JSON."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tvr.core.sampling_params import MAX_LOGPROBS, SamplingParams
from tvr.serve.errors import bad_request
from tvr.serve.fields import AnyObject, Bias, Name, Prompts, TokenIds, TokenList, Words, refusal
from tvr.serve.messages import Messages

#: Most answers to a prompt, as OpenAI has it.
_MOST_ANSWERS = 128

_INT64 = 1 << 63

_T = TypeVar("_T", bound="Fields")


class Fields(BaseModel):
    """A JSON object whose fields have exactly their types; null stands for a field left out.

    Attributes:
        UNSUPPORTED: fields of OpenAI's that are refused by name.
        NEUTRAL: values of fields that ask for nothing, and are taken as left out.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    UNSUPPORTED: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}

    @classmethod
    def of(cls: type[_T], data: dict[str, Any]) -> _T:
        """Return the fields of `data`.

        Raises:
            ApiError: 400, naming the field at fault.
        """
        neutral = cls.NEUTRAL
        given = {
            name: value
            for name, value in data.items()
            if value is not None and value not in neutral.get(name, ())
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            unsupported = cls.UNSUPPORTED | cls.NEUTRAL.keys()
            raise refusal(error, unsupported, list(cls.model_fields)) from error


class StreamOptions(BaseModel):
    """What a stream has besides answers.

    Attributes:
        include_usage: a last chunk with the number of tokens.
        continuous_usage_stats: the number so far in every chunk.
        include_obfuscation: OpenAI's padding against those who watch the network; there is none.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationFields(Fields):
    """What both ways to ask for answers have in common; those from `top_k` on are vLLM's."""

    model: Name
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: Words | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Bias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Name | None = None
    user: str | None = None  # who asks has no effect here

    _SAMPLING: ClassVar[tuple[str, ...]] = (
        *("n", "temperature", "top_p", "max_tokens", "seed", "stop", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty"),
        *("min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words"),
        *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    )

    @property
    def usage(self) -> StreamOptions:
        """What the stream has besides answers."""
        return self.stream_options or StreamOptions()

    def _params(self, **more: object) -> SamplingParams:
        """Return how to sample; what is left out is as the defaults are."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is for streams; set stream", param="stream_options")
        given = {name: getattr(self, name) for name in self._SAMPLING}
        set_ones = {name: value for name, value in given.items() if value is not None}
        arguments: dict[str, Any] = {**set_ones, **more}
        return SamplingParams(**arguments)


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    UNSUPPORTED = frozenset({"suffix"})
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"suffix": ("",)}

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None

    def params(self) -> SamplingParams:
        """Return how to sample.

        Raises:
            ApiError, RequestError: the fields do not go together.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(
                f"best_of is {self.best_of} and n is {self.n or 1}; this server returns all "
                "answers it makes: leave best_of out",
                param="best_of",
                code="unsupported_parameter",
            )
        scored = self.logprobs if self.echo else None
        return self._params(logprobs=self.logprobs, prompt_logprobs=scored)


class ChatRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    UNSUPPORTED = frozenset(
        {
            *("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
            *("metadata", "moderation", "prompt_cache_options", "prompt_cache_retention"),
        }
    )
    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
    }

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: AnyObject | None = None
    safety_identifier: str | None = None  # as `user`
    prompt_cache_key: str | None = None  # a hint, which one server needs not

    def params(self) -> SamplingParams:
        """Return how to sample.

        Raises:
            ApiError, RequestError: the fields do not go together.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is "
                f"{self.max_completion_tokens}; give one of them",
                param="max_completion_tokens",
            )
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(logprobs=num_top, max_tokens=limits.pop() if limits else None)


class TokenizeRequest(Fields):
    """`POST /tokenize`: the tokens of a text, or of a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: AnyObject | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise an `ApiError` unless there is one thing to tokenise, with its own fields."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", param="prompt")
        others = ["add_generation_prompt", "chat_template_kwargs"]
        given = "prompt"
        if self.messages is not None:
            others, given = ["add_special_tokens"], "messages"
        for name in others:
            if getattr(self, name) is not None:
                raise bad_request(f"{name} is not for {given}; leave it out", param=name)


class DetokenizeRequest(Fields):
    """`POST /detokenize`: the text of tokens."""

    model: Name | None = None
    tokens: TokenList
