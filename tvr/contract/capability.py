"""Capability as data: what a backend says it can do, and the one judge of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tvr.contract.specs import DTYPES, OpSpec
from tvr.errors import PluginError

ABI_MAJOR = 1
ABI_MINOR = 0
ENTRY_POINT_GROUP = f"tvr.backends.v{ABI_MAJOR}"

FLAGS = frozenset({"cuda_graph", "plan_in_graph", "batch_invariant", "deterministic"})
NORM_ROUNDINGS = ("twice", "once")

# Spec fields with a default that a box judges by an attribute of its own, not by `fields`.
_JUDGED_BY_BOX = frozenset({"batch_invariant", "weight_format", "max_rows"})


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A device as hooks see it; no torch needed. `str()` gives torch's name of it.

    Attributes:
        type: "cpu" or "cuda".
        index: device index; None on CPU, and where `tvr backends` asks about a GPU that is not
            there.
        sm: compute capability as major * 10 + minor (90 on an H200); None on CPU.
        name: marketing name.
    """

    type: str
    index: int | None = None
    sm: int | None = None
    name: str = ""

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True, kw_only=True)
class Box:
    """One region of support: every listed value of each axis, in any combination.

    Attributes:
        dtypes: activation dtypes.
        devices: device types.
        min_sm: smallest compute capability (major * 10 + minor); None: any.
        head_dims, block_sizes, group_sizes, weight_formats: allowed values; None: any.
        max_rows: most rows a `linear` takes; None: any number.
        fields: names of spec fields honoured away from their neutral value.
        flags: a subset of `FLAGS`.
        norm_rounding: where a norm rounds to the activation dtype: "twice" (before and after
            the weight) or "once" (after).
    """

    dtypes: Sequence[str]
    devices: Sequence[str] = ("cuda",)
    min_sm: int | None = None
    head_dims: Sequence[int] | None = None
    block_sizes: Sequence[int] | None = None
    group_sizes: Sequence[int] | None = None
    weight_formats: Sequence[str] | None = ("dense",)
    max_rows: int | None = None
    fields: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    norm_rounding: str = "twice"

    def __post_init__(self) -> None:
        for f in fields(self):
            # In a bare string `in` would look for a substring.
            if f.name != "norm_rounding" and isinstance(getattr(self, f.name), str):
                raise PluginError(
                    f"Box {f.name} is the string {getattr(self, f.name)!r}; give a list of values"
                )
        _refuse_unknown("dtypes", self.dtypes, DTYPES)
        _refuse_unknown("flags", self.flags, sorted(FLAGS))
        _refuse_unknown("norm_rounding", [self.norm_rounding], NORM_ROUNDINGS)

    def why_not(self, spec: OpSpec, device: DeviceFacts) -> list[str]:
        """Return the reasons this box does not cover `spec` on `device`; empty: it does."""
        reasons: list[str] = []

        def need(name: str, value: object, allowed: Sequence[Any] | None) -> None:
            if value is not None and allowed is not None and value not in allowed:
                choices = ", ".join(map(str, allowed)) or "none"
                reasons.append(f"{name} {value} is not among {choices}")

        need("device", device.type, self.devices)
        if self.min_sm is not None and device.type == "cuda" and (device.sm or 0) < self.min_sm:
            reasons.append(f"needs sm_{self.min_sm}, the device is sm_{device.sm}")
        need("dtype", spec.dtype, self.dtypes)
        need("head_dim", getattr(spec, "head_dim", None), self.head_dims)
        need("block_size", getattr(spec, "block_size", None), self.block_sizes)
        need("group_size", getattr(spec, "group_size", None), self.group_sizes)
        need("weight_format", getattr(spec, "weight_format", None), self.weight_formats)
        if self.max_rows is not None and hasattr(spec, "max_rows"):
            asked = spec.max_rows
            if asked is None or asked > self.max_rows:
                reasons.append(f"takes at most {self.max_rows} rows, asked for {asked or 'any'}")
        if spec.batch_invariant and "batch_invariant" not in self.flags:
            reasons.append("is not declared batch_invariant")
        for name, value in spec.non_neutral().items():
            if name not in _JUDGED_BY_BOX and name not in self.fields:
                reasons.append(f"{name}={value} is not supported")
        return reasons


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """What a backend is and what it declares, as plain data.

    Attributes:
        name: unique short name, as used by `--backend` and in plugins.toml.
        abi: (major, minor) of the contract it was written for, spelt out: taken from the
            installed tvr it would say nothing.
        ops: for each op it serves, boxes whose union is what it supports.
    """

    name: str
    abi: tuple[int, int]
    ops: Mapping[str, Sequence[Box]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9_.-]*", self.name):
            raise PluginError(
                f"backend name {self.name!r} is not valid; use lower-case letters, digits, "
                "'_', '-' and '.', starting with a letter"
            )
        match self.abi:
            case (int(), int()):
                pass
            case _:
                raise PluginError(
                    f"backend {self.name!r}: abi {self.abi!r} is not a pair (major, minor)"
                )
        for op, boxes in self.ops.items():
            if not isinstance(boxes, Sequence) or not all(isinstance(b, Box) for b in boxes):
                raise PluginError(f"backend {self.name!r}: op {op!r} must map to a list of Box")
            if not boxes:
                raise PluginError(f"backend {self.name!r} lists op {op!r} with no box; drop the op")


def why_not(info: BackendInfo, spec: OpSpec, device: DeviceFacts) -> list[str]:
    """Return why `info` does not declare support for `spec` on `device`; empty: it does.

    The only judge of declared support. Where several boxes miss, the reasons of the nearest one
    (the fewest reasons) are given.
    """
    boxes = info.ops.get(spec.op)
    if not boxes:
        return [f"does not implement {spec.op}"]
    return min((box.why_not(spec, device) for box in boxes), key=len)


def matching_box(info: BackendInfo, spec: OpSpec, device: DeviceFacts) -> Box | None:
    """Return the first box that covers `spec` on `device`, or None."""
    for box in info.ops.get(spec.op, ()):
        if not box.why_not(spec, device):
            return box
    return None


def declared_flags(info: BackendInfo, spec: OpSpec, device: DeviceFacts) -> frozenset[str]:
    """Return the flags `info` declares for `spec`: those of every box that covers it."""
    boxes = info.ops.get(spec.op, ())
    return frozenset().union(*(box.flags for box in boxes if not box.why_not(spec, device)))


def _refuse_unknown(what: str, values: object, allowed: Sequence[str]) -> None:
    unknown = [v for v in values if v not in allowed]  # type: ignore[attr-defined]
    if unknown:
        raise PluginError(f"Box {what} {unknown} not known; allowed: {', '.join(allowed)}")
