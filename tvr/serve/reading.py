"""What clients' bodies ask for. Runs in any thread, and in a process of its own."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from tvr.core.sampling_params import SamplingParams
from tvr.serve.body import parse
from tvr.serve.errors import check_model, encode_json
from tvr.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    StreamOptions,
    TokenizeRequest,
)
from tvr.serve.texts import Texts


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks of the engine.

    Attributes:
        model: the name it asks for.
        prompts: token ids of each, int32; arrays go from one process to another at once.
        params: how to sample.
        echoes: text of each prompt, which its answers begin with; None: they do not.
        streams: each step's tokens are wanted at once.
        options: what a stream has besides answers.
        cache_salt: see the engine's `add_request`.
    """

    model: str
    prompts: list[array[int]]
    params: SamplingParams
    echoes: list[str] | None
    streams: bool
    options: StreamOptions
    cache_salt: str | None


class Reader:
    """Reads bodies, one method for each route that takes one. Can be pickled.

    Args:
        texts: of the model.
        model_names: those that requests may ask for.

    All methods take a body and raise ApiError or RequestError if it cannot be served.
    """

    def __init__(self, texts: Texts, model_names: tuple[str, ...]) -> None:
        self._texts = texts
        self._model_names = model_names

    def completions(self, body: bytes) -> Asked:
        """Return what `/v1/completions` is asked for."""
        request = CompletionRequest.of(parse(body))
        self._check_model(request.model)
        params = request.params()
        prompts = self._texts.prompts_of(request)
        echoes = [self._texts.text_of(p) for p in request.prompt] if request.echo else None
        return _asked(request, prompts, params, echoes)

    def chat(self, body: bytes) -> Asked:
        """Return what `/v1/chat/completions` is asked for."""
        request = ChatRequest.of(parse(body))
        self._check_model(request.model)
        params = request.params()
        return _asked(request, [self._texts.conversation_of(request)], params, None)

    def tokenize(self, body: bytes) -> bytes:
        """Return the JSON that `/tokenize` answers."""
        request = TokenizeRequest.of(parse(body))
        self._check_model(request.model)
        return encode_json(self._texts.tokenize(request))

    def detokenize(self, body: bytes) -> bytes:
        """Return the JSON that `/detokenize` answers."""
        request = DetokenizeRequest.of(parse(body))
        self._check_model(request.model)
        return encode_json(self._texts.detokenize(request))

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self._model_names)


def _asked(
    request: GenerationFields,
    prompts: list[list[int]],
    params: SamplingParams,
    echoes: list[str] | None,
) -> Asked:
    return Asked(
        model=request.model,
        prompts=[array("i", token_ids) for token_ids in prompts],
        params=params,
        echoes=echoes,
        streams=bool(request.stream),
        options=request.usage,
        cache_salt=request.cache_salt,
    )
