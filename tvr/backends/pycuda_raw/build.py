"""Compiling many kernels ahead, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from tvr.backends.pycuda_raw.cache import CompiledKernel
from tvr.backends.pycuda_raw.compile import Compiler
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError


@dataclass(frozen=True)
class Job:
    """A kernel to compile.

    Attributes:
        variant: which one.
        sm: for which architecture, major * 10 + minor.
        ops: that load it.
    """

    variant: KernelVariant
    sm: int
    ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return which kernel it is, for people."""
        return self.variant.label(self.sm)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job: a kernel, or an error.

    Attributes:
        was_there: the kernel came from the cache.
    """

    job: Job
    kernel: CompiledKernel | None = None
    was_there: bool = False
    error: KernelError | None = None


def build(
    compiler: Compiler,
    jobs: Sequence[Job],
    *,
    workers: int,
    force: bool = False,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Do every job, also after one failed; return what became of them, in the order of `jobs`.

    Args:
        workers: compilers that run at once.
        force: compile what is in the cache too.
        report: called in this thread as each is done.
    """

    def work(job: Job) -> Outcome:
        try:
            kernel, was_there = compiler.compile(job.variant, job.sm, force=force)
        except KernelError as error:
            return Outcome(job=job, error=error)
        return Outcome(job=job, kernel=kernel, was_there=was_there)

    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(work, job) for job in jobs]
        for future in as_completed(futures):
            report(future.result())
        return [future.result() for future in futures]
    finally:
        # Interrupted: the compilers under way end their kernel, the others never start.
        pool.shutdown(cancel_futures=True)
