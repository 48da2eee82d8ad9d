"""Two results side by side: the ratio of each quantity, where it is more than the spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from tvr.bench.results import QUANTITIES, Identity, Results, spread
from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.bench.rows import Row

NO_DIFFERENCE = "no difference"

_HEAD = ["quantity", "A", "B", "B/A", ""]


class Compared(NamedTuple):
    """A quantity of a row in both files.

    Attributes:
        name: of the quantity.
        a, b: its values.
        verdict: what B is: "faster", "slower", "no difference" if their spreads overlap; "": one
            has no spread.
    """

    name: str
    a: float
    b: float
    verdict: str

    @property
    def ratio(self) -> float:
        """B by A."""
        return self.b / self.a


def compare_rows(a: Row, b: Row) -> list[Compared]:
    """Return what both rows measure."""
    return [
        Compared(name, a[name], b[name], _verdict(name, a, b))
        for name in QUANTITIES
        if a.get(name) and b.get(name)
    ]


def _verdict(name: str, a: Row, b: Row) -> str:
    base, less_is_better = QUANTITIES[name]
    mine, other = spread(a, base), spread(b, base)
    if mine is None or other is None:
        return ""
    if mine[0] <= other[1] and other[0] <= mine[1]:
        return NO_DIFFERENCE
    return "faster" if (b[name] < a[name]) == less_is_better else "slower"


def match(a: Results, b: Results) -> tuple[Mapping[Identity, Row], Mapping[Identity, Row]]:
    """Return the rows of both files by the same identities.

    Files of one backend each, which are not the same, are compared as those two backends.

    Raises:
        ConfigError: no row is in both.
    """
    if a.rows.keys() & b.rows.keys():
        return a.rows, b.rows
    if len(a.backends) == len(b.backends) == 1 and a.backends != b.backends:
        mine, theirs = a.without_backend(), b.without_backend()
        if mine.keys() & theirs.keys():
            return mine, theirs
    raise ConfigError(
        f"{a.path} and {b.path} share no rows: {_differs(a, b)}; compare results of the same "
        "backend, or of one backend each, at the same sizes"
    )


def format_comparison(a: Results, b: Results) -> str:
    """Return what is in both files as text, and a line on what is not.

    Raises:
        ConfigError: no row is in both.
    """
    mine, theirs = match(a, b)
    shared = [key for key in mine if key in theirs]
    blocks = ["\n".join([_about("A", a), _about("B", b)])]
    by_names: dict[tuple[str, ...], list[Identity]] = {}
    for key in shared:
        by_names.setdefault(tuple(name for name, _ in key), []).append(key)
    blocks += [_table(keys, mine, theirs) for keys in by_names.values()]
    remarks = [
        f"{len(rows.keys() - others.keys())} of {len(rows)} rows are in {name} alone"
        for name, rows, others in (("A", mine, theirs), ("B", theirs, mine))
        if rows.keys() - others.keys()
    ]
    return "\n\n".join([*blocks, *(["\n".join(remarks)] if remarks else [])]) + "\n"


def _table(keys: Sequence[Identity], a: Mapping[Identity, Row], b: Mapping[Identity, Row]) -> str:
    """Return the table of rows that the same fields tell apart; equal fields are its heading."""
    names = [name for name, _ in keys[0]]
    columns = list(zip(*([value for _, value in key] for key in keys), strict=True))
    free = [i for i, column in enumerate(columns) if len(set(map(str, column))) > 1]
    heading = [f"{n} {columns[i][0]}" for i, n in enumerate(names) if i not in free]
    lines = [[*(names[i] for i in free), *_HEAD]]
    for place, key in enumerate(keys):
        which = [str(columns[i][place]) for i in free]
        cells = [
            [c.name, _number(c.a), _number(c.b), f"{c.ratio:.3f}", c.verdict]
            for c in compare_rows(a[key], b[key])
        ] or [["not measured", *_reasons(a[key], b[key])]]
        for number, cell in enumerate(cells):
            # A row's sizes are said once.
            lines.append([*(which if number == 0 else [""] * len(which)), *cell])
    return "\n".join([", ".join(heading), *_aligned(lines)])


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    columns = list(zip_longest(*lines, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    num_words = len(lines[0]) - len(_HEAD) + 1  # sizes, and the quantity's name
    return [
        "  ".join(
            cell.ljust(width) if i < num_words or i == len(columns) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]


def _reasons(a: Row, b: Row) -> list[str]:
    """Return in which of the files a row has no numbers."""
    return ["-" if "error" in row or "skipped" in row else "measured" for row in (a, b)] + ["-", ""]


def _about(name: str, results: Results) -> str:
    header = results.header
    facts = [header.get("device_name"), header.get("date"), *sorted(results.backends)]
    return f"{name}: {results.path} ({', '.join(str(fact) for fact in facts if fact)})"


def _differs(a: Results, b: Results) -> str:
    """Return the first field in which all of their rows differ."""
    mine = [dict(key) for key in a.rows]
    theirs = [dict(key) for key in b.rows]
    for name in dict.fromkeys(name for row in (*mine, *theirs) for name in row):
        ours, others = ({str(row.get(name)) for row in rows} for rows in (mine, theirs))
        if not ours & others:
            if {"None"} in (ours, others):
                which = a if others == {"None"} else b
                return f"only rows of {which.path} have {name}, so they measure different things"
            return f"{name} is {', '.join(sorted(ours))} and {', '.join(sorted(others))}"
    return "their sizes differ"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10_000 else f"{value:.4g}"
