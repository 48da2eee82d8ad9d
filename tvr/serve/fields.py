"""Types of request fields, and how a wrong one is told.

Long lists are checked here and not by pydantic, which would describe each wrong item of millions,
and those of a union once for each of its members.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema

from tvr.serve.errors import ApiError, bad_request

#: Most stop strings or bad words of a request, and their characters.
_MOST_WORDS, _LONGEST_WORD = 16, 256

#: Most token ids or biases of a request.
_MOST_IDS = 1024

#: Largest bias of a token, as OpenAI has it.
_LARGEST_BIAS = 100

#: Longest text that names something.
_LONGEST_NAME = 512

#: Characters of an unknown field's name that its refusal repeats.
_LONGEST_SHOWN = 80

_ID = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_WORD = {"type": "string", "minLength": 1, "maxLength": _LONGEST_WORD}
_TEXTS = {"type": "array", "items": _WORD, "maxItems": _MOST_WORDS}


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """Return the prompts that `prompt` stands for."""
    if isinstance(value, str) or _is_ids(value):
        return [value]  # type: ignore[list-item]
    if (
        isinstance(value, list)
        and value
        and (all(type(item) is str for item in value) or all(map(_is_ids, value)))
    ):
        return value
    raise ValueError("must be text, a list of token ids, or a list of either, none of them empty")


def _ids(value: object) -> list[int]:
    if value == [] or (_is_ids(value) and len(value) <= _MOST_IDS):  # type: ignore[arg-type]
        return value  # type: ignore[return-value]
    raise ValueError(f"must be a list of at most {_MOST_IDS} token ids")


def _any_ids(value: object) -> list[int]:
    if value == [] or _is_ids(value):
        return value  # type: ignore[return-value]
    raise ValueError("must be a list of token ids")


def _words(value: object) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if (
        isinstance(words, list)
        and len(words) <= _MOST_WORDS
        and all(isinstance(word, str) and 0 < len(word) <= _LONGEST_WORD for word in words)
    ):
        return words
    raise ValueError(
        f"must be a string or a list of at most {_MOST_WORDS} strings, each of 1 to "
        f"{_LONGEST_WORD} characters"
    )


def _bias(value: object) -> dict[str, float]:
    if isinstance(value, dict) and len(value) <= _MOST_IDS:
        wrong = [key for key in value if not (key.isascii() and key.isdecimal() and len(key) < 20)]
        if not wrong and set(map(type, value.values())) <= {int, float}:
            _check_biases(value)
            return value
    raise ValueError(f"must be an object of at most {_MOST_IDS} token ids and numbers")


def _check_biases(value: dict[str, float]) -> None:
    for token_id, bias in value.items():
        if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:
            raise ValueError(
                f"must have biases from -{_LARGEST_BIAS} to {_LARGEST_BIAS}, and token {token_id} "
                f"has {bias}"
            )


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError("must be an object")


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
TokenIds = Annotated[
    list[int],
    PlainValidator(_ids),
    WithJsonSchema({"type": "array", "items": _ID, "maxItems": _MOST_IDS}),
]
TokenList = Annotated[
    list[int],
    PlainValidator(_any_ids),
    WithJsonSchema({"type": "array", "items": _ID}),
]
Words = Annotated[
    list[str],
    PlainValidator(_words),
    WithJsonSchema({"anyOf": [_WORD, _TEXTS]}),
]
Bias = Annotated[
    dict[str, float],
    PlainValidator(_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,19}$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -_LARGEST_BIAS,
                "maximum": _LARGEST_BIAS,
            },
            "maxProperties": _MOST_IDS,
        }
    ),
]
AnyObject = Annotated[dict[str, Any], PlainValidator(_object), WithJsonSchema({"type": "object"})]
Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]


def refusal(error: ValidationError, unsupported: frozenset[str], known: list[str]) -> ApiError:
    """Return what a client is told about the first thing wrong with its fields.

    Args:
        error: pydantic's.
        unsupported: fields of OpenAI's that this server does not serve.
        known: the fields at the top.
    """
    first = error.errors(include_url=False)[0]
    place, found = first["loc"], first.get("input")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    if first["type"] == "extra_forbidden":
        if name in unsupported:
            return bad_request(
                f"{name} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
        others = f"; known are {', '.join(known)}" if len(place) == 1 else "; leave it out"
        return bad_request(
            f"there is no field {name[:_LONGEST_SHOWN]!r}{others}",
            param=name[:_LONGEST_NAME],
            code="unknown_parameter",
        )
    if first["type"] == "missing":
        return bad_request(f"the field {name} is missing", param=name)
    what = first["msg"].removeprefix("Value error, ")
    what = what.replace("Input should be", "must be")
    return bad_request(f"{name} is {reprlib.repr(found)}; it {what}", param=name or None)
