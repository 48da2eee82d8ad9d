"""Triton's interpreter as a device: kernels run on the CPU, and are slow and can be debugged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, ClassVar

import torch
import triton.language as tl

#: Programs that run one after another stand for a GPU of so many multiprocessors.
INTERPRETED_SMS = 2


class Interpreter:
    """Triton's interpreter on the CPU: programs run one after another, in NumPy.

    So do launches of several threads.
    """

    device = torch.device("cpu")
    sm = 0
    num_sms = INTERPRETED_SMS
    pdl = False

    # Where in the grid a program is, and what its language means, Triton keeps for the process.
    _one_launch: ClassVar[Lock] = Lock()

    def __init__(self) -> None:
        _leave_out_overflow_checks()

    def launch(
        self,
        kernel: Any,  # noqa: ANN401
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Run when no other launch of the process runs; `options` are for compilers."""
        with self._one_launch, _language_translated_once():
            kernel[grid](*args, **constants)

    def leave_to_l1(self, compiled: None) -> None:
        """Do nothing: there is nothing that is split."""


def _leave_out_overflow_checks() -> None:
    """Let the interpreter not look, at each sum and product, whether an integer overflowed.

    To look takes a third of its time, and unless it debugs it drops what it finds.
    """
    from triton.runtime.interpreter import interpreter_builder  # GPUs need none of it

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = replace(options, sanitize_overflow=False)


@contextmanager
def _language_translated_once() -> Iterator[None]:
    """Let the launch inside give each module of Triton's language its meaning in NumPy once.

    The interpreter does so again at each call of one jitted function by another, which takes half
    of its time and changes nothing: until the launch ends nobody takes the meaning back.
    """
    from triton.runtime import interpreter  # GPUs need none of it

    translate = interpreter._patch_lang
    translated: set[str] = set()

    def translate_once(function: Callable[..., Any]) -> Any:  # noqa: ANN401
        globals_ = function.__globals__.values()
        seen = {value.__name__ for value in globals_ if value is tl or value is tl.core}
        if seen <= translated:
            return None
        translated.update(seen)
        return translate(function)

    interpreter._patch_lang = translate_once
    try:
        yield
    finally:
        interpreter._patch_lang = translate
