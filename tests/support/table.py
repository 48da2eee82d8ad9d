"""An op table for model tests: the reference backend, with any op replaceable by a faulty one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tvr.backends.torch_ref import plugin
from tvr.contract import BoundOp, DeviceFacts, OpSpec

#: Given the right `run` and the spec, returns the `run` to use.
Wrap = Callable[[Callable[..., Any], OpSpec], Callable[..., Any]]


class ReferenceTable:
    """Binds every spec to the torch reference, without plug-in discovery.

    Args:
        wraps: for an op's name, what to make of its `run`.
    """

    def __init__(self, wraps: Mapping[str, Wrap] | None = None) -> None:
        self._wraps = dict(wraps or {})
        self._device = DeviceFacts(type="cpu")

    def bind(self, spec: OpSpec) -> BoundOp:
        """Return the reference's op for `spec`, wrapped if asked for."""
        bound: BoundOp | None = getattr(plugin, f"tvr_bind_{spec.op}")(spec, self._device)
        assert bound is not None, f"the reference must serve {spec}"
        wrap = self._wraps.get(spec.op)
        return replace(bound, run=wrap(bound.run, spec)) if wrap else bound
