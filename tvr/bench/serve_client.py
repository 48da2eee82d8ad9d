"""Asks an OpenAI-compatible server, and notes when each part of the answer comes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import httpx2

from tvr.bench.serve_answer import Answer, Chunk
from tvr.bench.serve_sse import DONE, EventReader
from tvr.errors import ConfigError

Client: TypeAlias = httpx2.AsyncClient
Prompt: TypeAlias = str | Sequence[int]

#: A server that is asked for everything at once takes a while to accept.
_CONNECT_S = 60.0
_REQUESTS_OF_A_CLIENT = 32
_LONGEST_REASON = 300

#: How a server says that it does not take a request of this form.
_REFUSED = (400, 422)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server's endpoint and how it wants to be asked.

    Attributes:
        base_url: such as `http://127.0.0.1:8000`.
        endpoint: such as `/v1/completions`, or one of chats.
        model: the name the server knows it by.
        output_len: tokens of an answer.
        ignore_eos: whether to ask for all of them, whatever the model says.
        counts_each: whether to ask for the number of tokens in each chunk, an extension of
            vLLM's; else only the last one has it.
    """

    base_url: str
    endpoint: str
    model: str
    output_len: int
    ignore_eos: bool = False
    counts_each: bool = True

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url + self.endpoint

    @property
    def is_chat(self) -> bool:
        """Whether the endpoint takes messages, and so no token ids."""
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Return the JSON of a request."""
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        if self.counts_each:
            asked["stream_options"]["continuous_usage_stats"] = True
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return asked


@asynccontextmanager
async def open_clients(api_key: str | None, num_requests: int) -> AsyncIterator[list[Client]]:
    """Yield clients for so many requests at once, to be asked in turn.

    A client looks at all its connections for each request, so each has a few only. They take no
    proxy from the environment: one would be part of what is measured.
    """
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    certificates = httpx2.create_ssl_context()  # which takes a while
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx2.AsyncClient(
                    headers=headers,
                    verify=certificates,
                    limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
                    timeout=httpx2.Timeout(None, connect=_CONNECT_S),
                    trust_env=False,
                )
            )
            for _ in range(-(-num_requests // _REQUESTS_OF_A_CLIENT))
        ]


async def first_model(client: Client, base_url: str) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: it cannot be reached, or lists none.
    """
    url = f"{base_url}/v1/models"
    try:
        response = await client.get(url)
        if response.status_code != httpx2.codes.OK:
            raise ConfigError(f"{url}: {_refusal(response)}; name the model by --model")
        name = response.json()["data"][0]["id"]
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(f"{base_url} cannot be asked: {_says(error)}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} lists no models; name one by --model") from error
    return str(name)


async def agree(
    client: Client, target: Target, ids: Sequence[int], text: str
) -> tuple[Target, bool, str | None]:
    """Return how the server wants to be asked, whether by token ids, and why not so.

    What it refuses is asked again in plainer words: without a count of tokens in each chunk, then
    by text.

    Raises:
        ConfigError: it cannot be reached, or serves no form of the request; says why.
    """
    reasons: list[str] = []
    for prompt in (text,) if target.is_chat else (ids, text):
        for counts_each in (True, False):
            form = replace(target, counts_each=counts_each)
            answer = await ask(client, form, prompt)
            if answer.error is None:
                by_ids = prompt is ids
                return form, by_ids, None if by_ids or target.is_chat else reasons[1]
            reasons.append(answer.error)
            if answer.status not in _REFUSED:
                raise ConfigError(f"{target.url} did not serve a first request: {answer.error}")
    raise ConfigError(f"{target.url} did not serve a first request: {reasons[0]}")


async def ask(client: Client, target: Target, prompt: Prompt) -> Answer:
    """Send one request and return what came of it; whatever fails is the answer's `error`."""
    answer = Answer(start=time.perf_counter(), prompt_tokens=_num_tokens(prompt))
    try:
        # json= would be encoded by the client as it sends; the clock starts when that is done.
        content = json.dumps(target.body(prompt)).encode()
        headers = {"Content-Type": "application/json"}
        answer.start = time.perf_counter()
        async with client.stream("POST", target.url, content=content, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code == httpx2.codes.OK:
                answer.error = await _read(response, answer)
            else:
                await response.aread()
                answer.error = _refusal(response)
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        said = _says(error)
        answer.error = (
            f"the stream broke off after {len(answer.chunks)} chunks: {said}"
            if answer.chunks
            else f"no answer came: {said}"
        )
    return answer


async def _read(response: httpx2.Response, answer: Answer) -> str | None:
    """Note what an answer brings; return what is wrong with it, if anything."""
    reader, ended = EventReader(), False
    async for received in response.aiter_bytes():
        at = time.perf_counter() - answer.start
        for payload in reader.feed(received):
            if payload == DONE:
                ended = True
                continue
            try:
                event = json.loads(payload)
                if event.get("error"):
                    return f"the server says: {_one_line(_message(event))}"
                ended |= _note(event, at, answer)
            except (ValueError, LookupError, TypeError, AttributeError):
                return (
                    f"the stream has no completion: {_one_line(payload.decode(errors='replace'))}"
                )
    if not answer.chunks:
        kind = response.headers.get("content-type", "nothing that has a name")
        what = "" if kind.startswith("text/event-stream") else f", and is {kind}"
        return f"the stream ended without a token{what}"
    if not ended:
        return f"the stream ended after {len(answer.chunks)} chunks, without a finish_reason"
    return None


def _note(event: dict[str, Any], at: float, answer: Answer) -> bool:
    """Note an event of a stream, and return whether it says that the answer is complete."""
    usage = event.get("usage") or {}
    total = usage.get("completion_tokens")
    if total is not None:
        answer.usage = int(total)
        answer.prompt_tokens = int(usage.get("prompt_tokens") or answer.prompt_tokens)
    ended = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        text = choice["text"] if delta is None else _text(delta)
        ended = choice.get("finish_reason") is not None
        # A token may bring no text yet; an end by itself, or a chat's role, is none.
        if text or not (ended or (delta or {}).get("role")):
            answer.chunks.append(Chunk(at, total, bool(text)))
    return ended


def _text(delta: dict[str, Any]) -> str:
    """Return what a part of a chat's answer brings, thoughts included."""
    parts = (delta.get(name) for name in ("content", "reasoning_content", "reasoning"))
    return "".join(part for part in parts if part)


def _num_tokens(prompt: Prompt) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _refusal(response: httpx2.Response) -> str:
    """Return a line on a response that is no success; its body has been read."""
    try:
        said = _message(response.json())
    except ValueError:
        said = response.text
    status = f"HTTP {response.status_code}"
    return f"{status}: {line}" if (line := _one_line(said)) else status


def _message(body: object) -> str:
    """Return the message of {"error": {"message": ...}} and its kin."""
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(name):
            return _message(body[name])
    return body if isinstance(body, str) else json.dumps(body)


def _says(error: Exception) -> str:
    return _one_line(str(error)) or type(error).__name__


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
