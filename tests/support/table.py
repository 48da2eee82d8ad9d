"""An op table for model tests: the reference backend, with any op replaceable by a faulty one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tvr.contract import BoundOp, DeviceFacts, OpSpec
from tvr.core.ops import OpTable
from tvr.core.plugins import BackendManager

#: Given the right `run` and the spec, returns the `run` to use.
Wrap = Callable[[Callable[..., Any], OpSpec], Callable[..., Any]]

CPU = DeviceFacts(type="cpu")


class WrappedTable(OpTable):
    """A table of the reference's ops on the CPU.

    Args:
        wraps: for an op's name, what to make of its `run`.

    Attributes:
        specs: every spec asked for, in order.
    """

    def __init__(self, wraps: Mapping[str, Wrap] | None = None) -> None:
        super().__init__(BackendManager(device=CPU), CPU, backend="torch")
        self._wraps = dict(wraps or {})
        self.specs: list[OpSpec] = []

    def bind(self, spec: OpSpec) -> BoundOp:
        """Return the reference's op for `spec`, wrapped if asked for."""
        self.specs.append(spec)
        bound = super().bind(spec)
        wrap = self._wraps.get(spec.op)
        return replace(bound, run=wrap(bound.run, spec)) if wrap else bound
