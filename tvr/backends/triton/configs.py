"""Tuned configurations: measured once by tools/tune_triton.py, looked up when an op is bound."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from tvr.backends.triton.launch import Config
from tvr.errors import PluginError

#: What an entry is looked up by: op, compute capability (major * 10 + minor), shape class.
Key: TypeAlias = tuple[str, int, frozenset[tuple[str, int | str]]]
Table: TypeAlias = Mapping[Key, Config]

#: What looks itself up, an op or one of its kernels, and the blocks it has.
BLOCKS: dict[str, frozenset[str]] = {
    "rms_norm": frozenset(),
    "add_rms_norm": frozenset(),
    "rope": frozenset({"TOKENS", "HEADS"}),
    "rope_kv_write": frozenset({"TOKENS", "HEADS"}),
    "kv_write": frozenset({"HEADS"}),
    "attention_decode": frozenset({"PROGRAMS"}),
    "attention_prefill": frozenset({"ROWS", "KEYS", "LAG", "SOURCES"}),
    "silu_mul": frozenset({"BLOCK"}),
    "linear_plain": frozenset({"BN", "BK"}),
    "linear_dot": frozenset({"BN", "BK", "PARTS"}),
    "fused_linear": frozenset({"BN", "BK"}),
    "argmax": frozenset({"BLOCK", "KEYS"}),
    "prepare_step": frozenset({"COLUMNS"}),
    "sample_best": frozenset({"BLOCK"}),
    "sample_race": frozenset({"BLOCK"}),
    "sample_before": frozenset({"WIDE"}),
    "sample_choice": frozenset({"WIDE"}),
    "top_logprobs": frozenset({"SEGMENTS", "SEGMENT"}),
}
#: Blocks that count something else than a tile's rows or columns, and so may be any number.
_COUNTS = frozenset({"PROGRAMS"})
#: The fields of an entry of the file, and what each must be.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "op": (lambda x: _is_text(x) and x in BLOCKS, f"one of {', '.join(BLOCKS)}"),
    "sm": (lambda x: _is_count(x), "a whole number"),
    "shape": (lambda x: _maps_to(x, lambda v: _is_text(v) or _is_count(v)), "an object"),
    "num_warps": (lambda x: _is_power_of_two(x) and x <= 32, "a power of two up to 32"),
    "num_stages": (lambda x: _is_count(x), "a whole number from 1"),
    "blocks": (lambda x: _maps_to(x, _is_count), "an object of whole numbers from 1"),
    "us": (lambda x: _is_time(x), "a time"),
    "default_us": (lambda x: _is_time(x), "a time"),
}
#: What the header says of each architecture: on what and with what its entries were measured.
_FACTS = ("gpu", "triton", "torch")
_HALVES = ("float16", "bfloat16")
_REMEDY = "install tvr again, or make the table again with tools/tune_triton.py"


def tuned(op: str, sm: int, default: Config, **shape_class: int | str) -> Config:
    """Return what was fastest for `op` on GPUs of compute capability `sm`. Nothing is measured.

    Args:
        op: the op, or one of its kernels.
        sm: major * 10 + minor; no other GPU's entry is taken for it.
        default: returned if the shipped table has no such entry.
        shape_class: facts by which shapes are told apart, like `dtype` and `head_dim`.

    Raises:
        PluginError: the shipped table is broken.
    """
    assert set(default.blocks) == BLOCKS[op], f"{op} is in BLOCKS with other blocks"
    return shipped().get(key(op, sm, shape_class), default)


def key(op: str, sm: int, shape_class: Mapping[str, int | str]) -> Key:
    """Return what a table knows a configuration by; fp16 and bf16 are as fast, and one."""
    dtype = shape_class.get("dtype")
    shape = {**shape_class, "dtype": "half"} if dtype in _HALVES else shape_class
    return op, sm, frozenset(shape.items())


@cache
def shipped() -> Table:
    """Return the table of tuned.json.

    Raises:
        PluginError: it is broken.
    """
    path = Path(__file__).with_name("tuned.json")
    try:
        return read_table(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PluginError(
            f"the table of the Triton backend, {path}, is broken: {error}; {_REMEDY}"
        ) from error


def read_table(text: str) -> Table:
    """Return the configurations in a table's text.

    Raises:
        ValueError: says what is wrong, in one line.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or set(found) != {"header", "entries"}:
        raise ValueError("it is not an object of header and entries")
    header, entries = found["header"], found["entries"]
    if not _maps_to(header, lambda facts: _maps_to(facts, _is_text) and set(facts) == set(_FACTS)):
        raise ValueError(f"its header does not give {', '.join(_FACTS)} for each sm_NN")
    if not isinstance(entries, list):
        raise ValueError("its entries are not a list")
    table: dict[Key, Config] = {}
    for i, entry in enumerate(entries):
        _check(i, entry)
        at = key(entry["op"], entry["sm"], entry["shape"])
        if at in table:
            raise ValueError(f"entry {i} has op, sm and shape of an earlier one")
        if f"sm_{entry['sm']}" not in header:
            raise ValueError(f"entry {i}: sm_{entry['sm']} is not in the header")
        table[at] = Config(entry["num_warps"], entry["num_stages"], entry["blocks"])
    return table


def _check(i: int, entry: Any) -> None:  # noqa: ANN401
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise ValueError(f"entry {i} is not an object of {', '.join(_FIELDS)}")
    for name, (is_right, wanted) in _FIELDS.items():
        if not is_right(entry[name]):
            raise ValueError(f"entry {i}: {name} is {entry[name]!r}; it must be {wanted}")
    op, blocks = entry["op"], entry["blocks"]
    if set(blocks) != BLOCKS[op]:
        raise ValueError(
            f"entry {i}: blocks are {_names(blocks)}; the kernel of {op} has {_names(BLOCKS[op])}"
        )
    for name, size in blocks.items():
        if name not in _COUNTS and not _is_power_of_two(size):
            raise ValueError(f"entry {i}: {name} is {size}; it must be a power of two")


def _names(blocks: Iterable[str]) -> str:
    return ", ".join(sorted(blocks)) or "none"


def _is_text(x: object) -> bool:
    return isinstance(x, str)


def _is_count(x: object) -> bool:
    return type(x) is int and x >= 1


def _is_power_of_two(x: object) -> bool:
    return type(x) is int and x >= 1 and x & (x - 1) == 0


def _is_time(x: object) -> bool:
    return type(x) in (int, float) and 0 < x < math.inf  # type: ignore[operator]


def _maps_to(x: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(x, dict) and all(map(is_right, x.values()))
