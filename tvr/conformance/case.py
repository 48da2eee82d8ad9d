"""A case: the spec an op is bound for and the sizes of one call, as data and as a line of text."""

from __future__ import annotations

import math
import types
import typing
import zlib
from dataclasses import MISSING, dataclass, fields

import torch

from tvr.conformance.model_spec import ModelSpec
from tvr.contract import SPECS, AttentionDecodeSpec, AttentionSpec, OpSpec
from tvr.errors import ConfigError

LEVELS = ("smoke", "quick", "full")

#: Name of cases that have none of their own: they are known by their text.
UNNAMED = "drawn"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call to judge a backend by.

    Attributes:
        name: unique among the named cases of an op; one more seed of its random numbers.
        spec: what the op is bound for.
        level: the first level that runs it.
        num_tokens: rows, for all ops but attention.
        q_lens, kv_lens: new tokens and keys of each sequence, for attention.
        seed: of its random numbers.
    """

    spec: OpSpec
    name: str = UNNAMED
    level: str = "smoke"
    num_tokens: int = 0
    q_lens: tuple[int, ...] = ()
    kv_lens: tuple[int, ...] = ()
    seed: int = 0

    @property
    def op(self) -> str:
        return self.spec.op

    @property
    def size(self) -> int:
        """A measure of how large the case is, for finding the smallest that fails."""
        rows = self.num_tokens + sum(self.q_lens) + sum(self.kv_lens)
        return max(rows, 1) * math.prod(v for v in vars(self.spec).values() if type(v) is int)

    @property
    def text(self) -> str:
        """The case written out; `parse_case` reads it back."""
        shown = {
            f.name: getattr(self.spec, f.name)
            for f in fields(self.spec)
            if f.default is MISSING or getattr(self.spec, f.name) != f.default
        }
        if self.q_lens:
            shown |= {"q_lens": self.q_lens, "kv_lens": self.kv_lens}
        else:
            shown["num_tokens"] = self.num_tokens
        shown["seed"] = self.seed
        return " ".join(f"{name}={_written(value)}" for name, value in shown.items())

    @property
    def handle(self) -> str:
        """What to ask for this case by: its name, or its text if it has none."""
        return self.text if self.name == UNNAMED else self.name

    def generator(self) -> torch.Generator:
        """Return a new CPU generator, seeded by the name and the seed."""
        # Hashed together: torch's CPU generator takes 32 bits of a seed and no more.
        key = f"{self.name} {self.seed}"
        return torch.Generator().manual_seed(zlib.crc32(key.encode()))


def parse_case(op: str, text: str) -> Case:
    """Return the case that `Case.text` wrote.

    Raises:
        ConfigError: it is none, or no such call can be.
    """
    spec_type = {**SPECS, ModelSpec.op: ModelSpec}[op]
    is_attention = issubclass(spec_type, AttentionSpec)
    sizes = {"q_lens": tuple, "kv_lens": tuple} if is_attention else {"num_tokens": int}
    kinds = {**_kinds(spec_type), **sizes, "seed": int}
    found: dict[str, object] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or name not in kinds or name in found:
            raise ConfigError(
                f"case {text!r}: {word!r} is not one of NAME=VALUE, each once; names: "
                f"{', '.join(kinds)}"
            )
        found[name] = _read(text, name, value, kinds[name])
    wanted = [f.name for f in fields(spec_type) if f.default is MISSING]
    if missing := [name for name in (*wanted, *sizes) if name not in found]:
        raise ConfigError(f"case {text!r}: {', '.join(missing)} missing")
    rest = {name: found.pop(name) for name in (*sizes, "seed") if name in found}
    case = Case(spec=spec_type(**found), **rest)  # type: ignore[arg-type]
    if reason := _why_impossible(case):
        raise ConfigError(f"case {text!r}: {reason}")
    return case


def _why_impossible(case: Case) -> str | None:
    q_lens, kv_lens = case.q_lens, case.kv_lens
    if len(q_lens) != len(kv_lens):
        return f"{len(q_lens)} q_lens and {len(kv_lens)} kv_lens; there must be as many"
    if min(case.num_tokens, case.seed, *q_lens, *kv_lens) < 0:
        return "a length, a number of tokens or a seed is below 0"
    if isinstance(case.spec, AttentionDecodeSpec) and set(q_lens) != {case.spec.max_q_len}:
        return f"q_lens of a decode must all be max_q_len, {case.spec.max_q_len}"
    return None


def _kinds(spec_type: type[OpSpec]) -> dict[str, type]:
    """Return spec field -> int, str, float or bool; `int | None` counts as int."""
    hints = typing.get_type_hints(spec_type)
    kinds = {}
    for f in fields(spec_type):
        hint = hints[f.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds[f.name] = options[0]
    return kinds


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(text: str, name: str, value: str, kind: type) -> object:
    try:
        if kind is tuple:
            return tuple(int(part) for part in value.split(","))
        if kind is bool:
            return {"True": True, "False": False}[value]
        return kind(value)
    except (ValueError, KeyError):
        wanted = "numbers with commas between" if kind is tuple else kind.__name__
        raise ConfigError(f"case {text!r}: {name} is {value!r}; it must be {wanted}") from None
