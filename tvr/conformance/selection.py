"""What of the suite to run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from tvr.conformance.case import LEVELS
from tvr.errors import ConfigError

#: Names that a message spells out; of a longer list it has the first few.
NAMED, FIRST_FEW = 12, 3
#: Cases drawn for each check of each op.
EXAMPLES = {"smoke": 3, "quick": 8, "full": 20}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of the suite to run; plain data, so that another process can be told.

    Attributes:
        ops: rows of the suite: ops of the contract, or "engine"; None: all.
        checks: names of checks; None: all that judge these ops.
        cases: names or texts of cases, none drawn; None: those of the level, and drawn ones.
        level: "smoke", "quick" or "full"; each runs the ones before it too.
        seed: of every random number, and of what is drawn.
        max_examples: cases drawn for each check of each op, and the simplest besides; 0: none;
            None: what the level says.
    """

    ops: tuple[str, ...] | None = None
    checks: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    level: str = "smoke"
    seed: int = 0
    max_examples: int | None = None

    def __post_init__(self) -> None:
        refuse_unknown("level", (self.level,), LEVELS)
        for name, value in (("seed", self.seed), ("max_examples", self.max_examples or 0)):
            if type(value) is not int or not 0 <= value < 2**31:
                raise ConfigError(
                    f"conformance: {name} is {value!r}; it must be a whole number from 0 to 2^31"
                )
        if self.cases is not None and len(self.ops or ()) != 1:
            raise ConfigError("conformance: a case belongs to one op; name that op too")

    @property
    def examples(self) -> int:
        """Cases to draw for each check of each op."""
        if self.cases is not None:
            return 0
        return EXAMPLES[self.level] if self.max_examples is None else self.max_examples


def refuse_unknown(what: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ConfigError that says what is known, if anything asked for is not."""
    for value in asked:
        if value not in known:
            raise ConfigError(
                f"conformance: {suggestion(value, known)}unknown {what} {value!r}; known: "
                f"{shortened(known)}"
            )


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return "did you mean 'rope'? ", the known name that is nearest; "": none is near."""
    return "".join(f"did you mean {near!r}? " for near in difflib.get_close_matches(name, known, 1))


def shortened(known: Sequence[str]) -> str:
    """Return the names with commas between; of a long list the first few, and where all are."""
    if len(known) <= NAMED:
        return ", ".join(known)
    more = len(known) - FIRST_FEW
    return f"{', '.join(known[:FIRST_FEW])} and {more} more; docs/conformance.md lists all checks"
