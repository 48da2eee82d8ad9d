"""The /commands of a chat."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

from tvr.cli.conversation import Conversation, Message
from tvr.cli.output import remark
from tvr.errors import RequestError

HELP = """\
/help            these commands
/reset           forget the conversation, but for the system message
/system TEXT     put TEXT in place of the system message; no TEXT: have none
/save FILE       write the conversation to FILE as JSON
/load FILE       go on with the conversation in FILE
/retry           take the last answer back and ask again
/set NAME VALUE  change how answers are made, as in /set temperature 0.7; alone: show all
/stats           times and memory of the last answer
/exit            end the chat, as Ctrl-D does
A \\ at a line's end goes on with the next line; Ctrl-C stops an answer; //x sends /x."""


def run_command(conversation: Conversation, line: str) -> str | None:
    """Do what `line` says, which begins with a slash; return a text to ask now, if any.

    Raises:
        EOFError: the chat is to end.
        RequestError: no such command, or it cannot be done; the conversation is as it was.
    """
    name, _, argument = line[1:].partition(" ")
    if name not in COMMANDS:
        raise RequestError(f"there is no command /{name}; /help lists them")
    return COMMANDS[name](conversation, argument.strip())


def _help(conversation: Conversation, argument: str) -> None:
    for line in HELP.splitlines():
        print(line)


def _reset(conversation: Conversation, argument: str) -> None:
    system = conversation.system
    conversation.messages.clear()
    conversation.set_system(system)


def _system(conversation: Conversation, argument: str) -> None:
    if not conversation.chat:
        raise RequestError("/system needs a model with a chat template")
    conversation.set_system(argument or None)


def _save(conversation: Conversation, argument: str) -> None:
    file = _file(argument)
    text = json.dumps(conversation.messages, indent=2, ensure_ascii=False) + "\n"
    if os.path.exists(file):  # file.exists() may raise
        _read(file)  # overwrites nothing but a conversation
    try:
        file.write_text(text, "utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{file} cannot be written: {reason}") from error
    remark(f"{len(conversation.messages)} messages are in {file}")


def _load(conversation: Conversation, argument: str) -> None:
    file = _file(argument)
    conversation.messages[:] = _read(file)
    remark(f"{len(conversation.messages)} messages came from {file}")


def _file(argument: str) -> Path:
    if not argument:
        raise RequestError("name a file, as in /save chat.json")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # there is no such user
        raise RequestError(f"{argument} cannot be used: {error}") from error


def _read(file: Path) -> list[Message]:
    """Return the conversation in `file`."""
    from tvr.core.chat import check_messages

    try:
        messages = json.loads(file.read_text("utf-8"))
        return check_messages(messages) if messages != [] else []
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, RequestError) as error:
        raise RequestError(f"{file} does not hold a conversation: {error}") from error


def _retry(conversation: Conversation, argument: str) -> str:
    asked = conversation.take_back()
    if asked is None:
        raise RequestError("there is nothing to retry yet")
    params = conversation.params
    if params.is_greedy:
        remark("the temperature is 0, so the answer stays the same; try /set temperature 0.7")
    elif params.seed is not None:
        # The seed fixes the tokens; another answer needs another one.
        conversation.params = dataclasses.replace(params, seed=params.seed + 1)
    return asked


def _set(conversation: Conversation, argument: str) -> None:
    params = conversation.params
    names = [field.name for field in dataclasses.fields(params) if field.name != "n"]
    if not argument:
        for name in names:
            print(f"{name} {json.dumps(getattr(params, name), default=str)}")
        return
    name, _, value = argument.partition(" ")
    if name not in names:
        raise RequestError(f"there is no setting {name!r}; there are {', '.join(names)}")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value.strip()  # a stop string needs no quotes
    conversation.params = dataclasses.replace(params, **{name: parsed})


def _stats(conversation: Conversation, argument: str) -> None:
    if conversation.last is None:
        raise RequestError("there is no answer yet")
    from tvr.cli.stats import print_stats

    print_stats(conversation.llm, conversation.last, conversation.most_blocks)


def _exit(conversation: Conversation, argument: str) -> None:
    raise EOFError


COMMANDS: dict[str, Callable[[Conversation, str], str | None]] = {
    "help": _help,
    "reset": _reset,
    "system": _system,
    "save": _save,
    "load": _load,
    "retry": _retry,
    "set": _set,
    "stats": _stats,
    "exit": _exit,
}
