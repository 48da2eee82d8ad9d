"""The messages of a chat request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

#: Most messages of a conversation.
_MOST_MESSAGES = 4096

_ROLES = ("system", "developer", "user", "assistant")
_KNOWN = frozenset({"role", "content", "name"})


def _messages(value: object) -> list[dict[str, Any]]:
    """Return the messages with what templates may see of them.

    A client may send back an answer as it came, with fields that are null or empty.
    """
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_MESSAGES:
        raise ValueError(f"must be a list of 1 to {_MOST_MESSAGES} messages")
    return [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ValueError(f"holds {where}, which must be an object")
    said = {key: item for key, item in message.items() if key in _KNOWN or item}
    unknown = sorted(said.keys() - _KNOWN)
    if unknown:
        raise ValueError(
            f"holds {where}[{unknown[0][:80]!r}], which is not supported; leave it out"
        )
    role = said.get("role")
    if role not in _ROLES:
        raise ValueError(f"holds {where}.role, which must be one of {', '.join(_ROLES)}")
    if said.get("name") is None:
        said.pop("name", None)
    elif not isinstance(said["name"], str):
        raise ValueError(f"holds {where}.name, which must be a string")
    # A newer word for the same thing, which templates do not know.
    return {**said, "role": "system"} if role == "developer" else said


def text_length(messages: list[dict[str, Any]]) -> int:
    """Return the number of characters of all texts."""
    total = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        total += sum(len(text) for text in texts if isinstance(text, str))
    return total


_PART = {
    "type": ["object", "string"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        "name": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
    "additionalProperties": {"enum": [None, False, 0, "", [], {}]},
}

Messages = Annotated[
    list[dict[str, Any]],
    PlainValidator(_messages),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": _MOST_MESSAGES}),
]
