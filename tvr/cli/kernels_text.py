"""What `tvr kernels` prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING

import typer

from tvr.cli.output import columns, remark
from tvr.cli.progress import suite_bar

if TYPE_CHECKING:
    from tvr.backends.pycuda_raw.build import Outcome
    from tvr.backends.pycuda_raw.cache import CompiledKernel, KernelCache

DECODE = "attention_decode"


@contextmanager
def build_reporter(total: int) -> Iterator[Callable[[Outcome], None]]:
    """Yield what to call with each outcome: a bar on a terminal, else a line on stdout."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    done = 0

    def show(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        report(done, outcome.job.variant.symbol)
        if not is_terminal:
            typer.echo(f"[{done}/{total}] {_outcome_text(outcome)}")

    with suite_bar(total) as report:
        yield show


def _outcome_text(outcome: Outcome) -> str:
    kernel = outcome.kernel
    if kernel is None:
        return f"{outcome.job}: failed"
    how = "in the cache" if outcome.was_there else f"{kernel.seconds:.1f} s"
    taken = kernel.resources
    return f"{outcome.job}: {taken.registers} registers, {taken.spill_bytes} bytes spilled, {how}"


class Report:
    """What a build came to.

    Attributes:
        failed: kernels that did not compile.
        spills: kernels that keep registers in memory.
        decode_spills: those among them that decode attention loads.
    """

    def __init__(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        self._outcomes = outcomes
        self._seconds = seconds
        self.failed = [o for o in outcomes if o.error is not None]
        self.spills = [o for o in outcomes if o.kernel and o.kernel.resources.spill_bytes]
        self.decode_spills = [o for o in self.spills if DECODE in o.job.ops]

    def print(self) -> None:
        """Print warnings and failures on stderr, and one line on stdout."""
        for warning in dict.fromkeys(
            w for o in self._outcomes if o.kernel for w in o.kernel.warnings
        ):
            remark(f"warning: {warning}")
        for outcome in self.spills:
            assert outcome.kernel is not None
            taken = outcome.kernel.resources
            kind = "decode kernel " if DECODE in outcome.job.ops else ""
            remark(
                f"warning: {kind}{outcome.job} spills: {taken.spill_store_bytes} bytes written, "
                f"{taken.spill_load_bytes} read"
            )
        self._print_failures()
        typer.echo(self._summary())

    def _print_failures(self) -> None:
        """Print a line for all that failed of the same, and what the compiler said, once each."""
        from tvr.backends.pycuda_raw.nvcc_log import read_messages
        from tvr.errors import CompileError

        alike: dict[str, list[Outcome]] = {}
        for outcome in self.failed:
            error = outcome.error
            found = error.found if isinstance(error, CompileError) else str(error)
            alike.setdefault(found, []).append(outcome)
        told = set()
        for outcomes in alike.values():
            count = f"{len(outcomes)} kernels: " if len(outcomes) > 1 else ""
            remark(f"error: {count}{outcomes[0].error}")
            logs = [o.error.log for o in outcomes if isinstance(o.error, CompileError)]
            for first_line, message in chain.from_iterable(map(read_messages, logs)):
                if first_line not in told:
                    told.add(first_line)
                    print(message, file=sys.stderr)

    def _summary(self) -> str:
        kernels = [(o.job, o.kernel) for o in self._outcomes if o.kernel is not None]
        there = sum(o.was_there for o in self._outcomes)
        parts = [f"{len(kernels)} kernels in {self._seconds:.1f} s, {there} of them in the cache"]
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        if kernels:
            job, most = max(kernels, key=lambda pair: pair[1].resources.registers)
            parts.append(f"at most {most.resources.registers} registers ({job})")
            parts.append(f"{len(self.spills)} spill" if self.spills else "none spills")
        return "; ".join(parts)


def kernel_table(cache: KernelCache, now: float) -> list[str]:
    """Return a line for each kernel in the cache, and one for all."""
    kernels = []
    for kernel in cache.kernels():
        with suppress(FileNotFoundError):  # another process has removed it since
            kernels.append((kernel, kernel.cubin.stat()))
    size = sum(status.st_size for _, status in kernels)
    total = f"{len(kernels)} kernels, {size_text(size)}, in {cache.folder}"
    if not kernels:
        return [total]
    rows: list[tuple[str, ...]]
    rows = [("kernel", "arch", "registers", "shared", "spills", "size", "age", "constants")]
    rows += [_row(kernel, status, now) for kernel, status in kernels]
    return [*columns(rows, right=range(2, 7)), total]


def _row(kernel: CompiledKernel, status: os.stat_result, now: float) -> tuple[str, ...]:
    taken = kernel.resources
    return (
        kernel.symbol,
        kernel.arch,
        str(taken.registers),
        str(taken.shared_bytes),
        str(taken.spill_bytes),
        size_text(status.st_size),
        _age_text(now - status.st_mtime),
        kernel.constants,
    )


def size_text(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _age_text(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
