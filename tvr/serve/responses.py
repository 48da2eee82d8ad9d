"""What answers hold, for the OpenAPI document. They are sent as plain dicts, which is cheaper."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every refusal and failure."""

    error: ErrorDetails


class PromptTokensDetails(BaseModel):
    """Which of the prompt's tokens cost nothing."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class Completion(BaseModel):
    """The answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class TokenLogprob(BaseModel):
    """A token, its bytes, and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The token that was chosen, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[ChosenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class Tokenized(BaseModel):
    """Tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """Text of tokens."""

    prompt: str


class Model(BaseModel):
    """A name that requests may ask for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    has_chat_template: bool


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """Requests are served."""

    status: Literal["ok"]
