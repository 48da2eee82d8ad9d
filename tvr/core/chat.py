"""Chat messages, and the jinja templates that lay them out as a prompt."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tvr.core.control_tokens import CLOSE, OPEN
from tvr.errors import RequestError


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with each content as one string.

    Content is a string, or a list of text parts, which are joined by newlines. Only an assistant
    message that calls tools may have none; templates then see "". Other keys pass unchanged.

    Raises:
        RequestError: no messages, or one that is not `{"role": str, "content": ...}` as above.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one message")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}; it must be a mapping")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where} has role {reprlib.repr(role)}; it must be a string such as 'user'"
        )
    content = message.get("content")
    if content is None:
        if role != "assistant" or not message.get("tool_calls"):
            raise RequestError(f"{where} ({role}) has no content; give a string, '' if empty")
        content = ""
    elif isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(where, part) for part in content)
    elif not isinstance(content, str):
        raise RequestError(
            f"{where} has content of type {type(content).__name__}; it must be a string or a "
            "list of text parts"
        )
    return {**message, "content": content}


def _part_text(where: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"{where} has a part of type {reprlib.repr(kind)}; this model takes only 'text'"
        )
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError(
            f"{where} has a text part whose text is {reprlib.repr(text)}, not a string"
        )
    return text


class ChatTemplate:
    """A model's chat template, or several under names, rendered as transformers renders them."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Take the templates; each is compiled when first used.

        Args:
            sources: jinja source by name. "default" is used, or "tool_use" where there is one
                and tools are given.
            special_tokens: what templates see as `bos_token`, `eos_token` and so on.
        """
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **kwargs: object
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: as `check_messages` returns them.
            add_generation_prompt: end with the opening of the assistant's turn.
            kwargs: variables for the template (`tools`, `documents`, `date_string`, ...); they
                go before `special_tokens`.

        Raises:
            RequestError: no template, or it fails on these messages.
        """
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self.sources else "default"
        if name not in self.sources:
            found = f" (it has templates {', '.join(self.sources)})" if self.sources else ""
            raise RequestError(
                f"the model has no default chat template{found}; add chat_template.jinja to its "
                "directory, or send a plain prompt"
            )
        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            return self._compiled[name].render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        # The template is foreign code: whatever it raises is this request's failure alone.
        except Exception as e:
            reason = " ".join(str(e).split()) or type(e).__name__
            raise RequestError(f"the model's chat template failed: {reason}") from e


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what training learns from; here, no effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    # Templates come with downloaded checkpoints, so they run in the sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which models were not trained on.
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:  # but keep the marks of control tokens, which must survive rendering
        text = re.sub(f"[^\0-\x7f{OPEN}{CLOSE}]", lambda m: json.dumps(m[0])[1:-1], text)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
