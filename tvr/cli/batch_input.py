"""The input of a batch: lines, and the request that each of them asks for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tvr.cli.conversation import NO_SYSTEM
from tvr.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tvr.core.llm import LLM
    from tvr.core.prompt import Prompt
    from tvr.core.sampling_params import SamplingParams

#: A line's number in its file, from 1, and its bytes without the line's end.
Line = tuple[int, bytes]

#: What a line says, by name.
Fields = dict[str, Any]

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")


class BatchOptions(NamedTuple):
    """What holds for every line.

    Attributes:
        params: where a line does not say otherwise.
        model: as it was named.
        chat: whether prompts are laid out as a chat; None: if the model has a template.
        system: system message of the prompts that are.
        jsonl: lines are JSON objects, not prompts.
    """

    params: SamplingParams
    model: str
    chat: bool | None
    system: str | None
    jsonl: bool

    def hash_of(self, line: Line) -> str:
        """Return a hash of a line and of the options that its result depends on."""
        text = f"{self.params}\n{self.model}\n{self.chat}\n{self.system}\n{self.jsonl}\n"
        return hashlib.sha256(text.encode("utf-8", "replace") + line[1]).hexdigest()[:16]


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file, or of stdin for "-", that are not blank.

    Raises:
        ConfigError: nothing can be read.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise ConfigError("--input - reads stdin, which is closed")
        data = sys.stdin.buffer.read()
    else:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"--input {path} cannot be read: {error.strerror}") from error
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(i, line.rstrip(b"\r")) for i, line in enumerate(lines, 1) if line.strip()]


def fields_of(line: Line, options: BatchOptions) -> Fields:
    """Return the fields of a line; a line of text has only a prompt.

    Raises:
        RequestError: it has none.
    """
    try:
        text = line[1].decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the line is not text: {error}; use UTF-8") from error
    return _json_object(text) if options.jsonl else {"prompt": text}


def name_of(fields: Fields) -> Fields:
    """Take the user's name for a line out of `fields`; return what hands it back.

    Raises:
        RequestError: it is no name.
    """
    name = fields.pop("id", None)
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise RequestError(f"id is {name!r}; it must be text or a whole number")
    return {} if name is None else {"id": name}


def request_of(fields: Fields, llm: LLM, options: BatchOptions) -> tuple[Prompt, SamplingParams]:
    """Return what `fields` ask for.

    Raises:
        TvrError: it is no request.
    """
    given = [key for key in PROMPT_KEYS if key in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RequestError(f"a line has one of {', '.join(PROMPT_KEYS)}; this one has {found}")
    value = fields[given[0]]
    prompt: Prompt
    if given[0] == "messages":
        prompt = llm.chat_prompt(value)
    elif given[0] == "prompt_token_ids":
        prompt = {"prompt_token_ids": value}
    elif isinstance(value, str):
        prompt = _laid_out(value, llm, options)
    else:
        raise RequestError(f"prompt is a {type(value).__name__}; it must be text")
    names = [field.name for field in dataclasses.fields(options.params)]
    changes = {key: value for key, value in fields.items() if key != given[0]}
    unknown = [key for key in changes if key not in names]
    if unknown:
        raise RequestError(f"there is no parameter {unknown[0]!r}; there are {', '.join(names)}")
    return prompt, dataclasses.replace(options.params, **changes)


def check_system(llm: LLM, options: BatchOptions) -> None:
    """Raise `ConfigError` if there is a system message and no chat to put it in."""
    if options.system is not None and not _uses_chat(llm, options):
        raise ConfigError(NO_SYSTEM)


def _json_object(text: str) -> Fields:
    try:
        fields = json.loads(text)
        json.dumps(fields, ensure_ascii=False).encode()  # an escape may stand for no character
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(f"the line is a JSON {type(fields).__name__}; it must be an object")
    return fields


def _laid_out(text: str, llm: LLM, options: BatchOptions) -> Prompt:
    """Return a text prompt as a chat, or as it is."""
    if not _uses_chat(llm, options):
        return text
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return llm.chat_prompt([*system, {"role": "user", "content": text}])


def _uses_chat(llm: LLM, options: BatchOptions) -> bool:
    if options.chat is not None:
        return options.chat
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template
