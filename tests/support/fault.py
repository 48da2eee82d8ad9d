"""A planted fault: the reference backend with one op's `run` wrapped.

A fault is a function `fault(right, spec, a)`: `a` holds the arguments of the call by name,
`right(**changes)` makes the right call with some of them changed, and `right.state` is a dict
that lives as long as the bound op, for faults that remember an earlier call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from tvr.backends.torch_ref import plugin
from tvr.contract import PROTOCOLS
from tvr.hookspecs import hookimpl


@dataclass(frozen=True)
class Fault:
    """What is wrong, and who must say so.

    Attributes:
        check: the check that must catch it.
        op: the op whose `run` is wrapped.
        fault: does the op's work, wrongly.
        level: the level at which it is caught.
        subject: what is checked, if it is not the op: "engine".
    """

    check: str
    op: str
    fault: Callable
    level: str = "smoke"
    subject: str = ""

    @property
    def name(self) -> str:
        return self.fault.__name__


def faulty(fault: Fault) -> SimpleNamespace:
    """Return the reference backend with the fault planted."""
    right_hook = getattr(plugin, f"tvr_bind_{fault.op}")
    parameters = list(inspect.signature(PROTOCOLS[fault.op].__call__).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    @hookimpl
    def bind(spec, device):
        bound, state = right_hook(spec=spec, device=device), {}
        if bound is None:
            return None

        def run(*args, **kwargs):
            a = dict(zip(names, args, strict=True)) | kwargs

            def right(**changes):
                b = a | changes
                return bound.run(*[b.pop(n) for n in names], **b)

            right.state = state
            return fault.fault(right, spec, a)

        return replace(bound, run=run)

    hooks = {name: value for name, value in vars(plugin).items() if name.startswith("tvr_")}
    return SimpleNamespace(**hooks | {f"tvr_bind_{fault.op}": bind})


def as_if_contiguous(x):
    """x's memory read, or written, as if its strides were those of a contiguous tensor."""
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, x.storage_offset())
