"""Compiles the Triton backend's kernels for GPUs that are not here.

    PYTHONPATH=tests:. python -m support.compile_triton [OP ...] [--sm 80,90] [--dtype bfloat16]

Each op is bound as on such a GPU and run on CPU tensors, but every launch is only compiled. One
line a kernel: registers, those that did not fit (spills), shared memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from support.op_calls import ONES, calls
from tvr.backends.triton.launch import PDL_MIN_SM
from tvr.backends.triton.plugin import OP_MODULES, bind

NUM_SMS = {80: 108, 90: 132, 120: 170}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel and what it takes.

    Attributes:
        spilled_bytes: what a thread keeps in local memory for want of registers.
        spills_in_loops: instructions of innermost loops that store or load such a thing.
    """

    name: str
    registers: int
    spilled_bytes: int
    spills_in_loops: int
    shared_bytes: int
    ptx: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.spills_in_loops} times in loops, {self.shared_bytes} bytes of shared memory"
        )


class AbsentDriver(DriverBase):
    """What Triton asks of a driver before it launches."""

    def __init__(self, sm: int) -> None:
        self._sm = sm

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._sm, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return self._sm  # a jitted function keeps one target for each number

    def get_current_stream(self, device: int) -> int:
        return 0


class AbsentGpu:
    """A GPU that is not here: what is launched on it is compiled and kept."""

    def __init__(self, sm: int) -> None:
        self.device = torch.device("cpu")
        self.sm = sm
        self.num_sms = NUM_SMS.get(sm, 132)
        self.pdl = sm >= PDL_MIN_SM
        self.compiled: list[Compiled] = []
        triton.runtime.driver.set_active(AbsentDriver(sm))

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        made = kernel.warmup(*args, grid=grid, **constants, **options)
        found = Compiled(
            made.metadata.name,
            *resources(made.asm["cubin"], made.metadata.name),
            made.metadata.shared,
            made.asm["ptx"],
        )
        if found not in self.compiled:
            self.compiled.append(found)

    def leave_to_l1(self, compiled: None) -> None:
        pass


def resources(cubin: bytes, name: str) -> tuple[int, int, int]:
    """Return registers, spilled bytes and spills in loops of a kernel, from its machine code."""
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools.cuobjdump.path, "-res-usage", file.name)
        found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+)", usage)
        assert found, usage
        registers, spilled = int(found[1]), int(found[2])
        sass = _output(tools.nvdisasm.path, "--print-code", file.name) if spilled else ""
    return registers, spilled, spills_in_loops(sass.splitlines())


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def spills_in_loops(sass: list[str]) -> int:
    """Return how many instructions of innermost loops store to or load from local memory."""
    labels = {line[:-1]: i for i, line in enumerate(sass) if line.startswith(".L_")}
    jumps = [(i, re.search(r"\bBRA.*`\((\.L_\w+)\)", line)) for i, line in enumerate(sass)]
    loops = [(labels[to[1]], i) for i, to in jumps if to and labels[to[1]] < i - 1]
    innermost = [
        (first, last)
        for first, last in loops
        if not any((first, last) != other and first <= other[0] <= last for other in loops)
    ]
    return sum(
        bool(re.search(r"\b(STL|LDL)\b", line))
        for first, last in innermost
        for line in sass[first:last]
    )


def compile_op(op: str, sm: int, dtype: str, **sizes: Any) -> list[Compiled]:
    """Return the kernels that `op` launches; `sizes` as in `Sizes`."""
    gpu = AbsentGpu(sm)
    for spec, call in calls(op, dtype, **sizes):
        call(bind(spec, gpu))
    return gpu.compiled


def _lines(job: tuple[str, int, str], sizes: dict[str, Any]) -> list[str]:
    op, sm, dtype = job
    return [f"{op} sm_{sm} {dtype}  {kernel}" for kernel in compile_op(op, sm, dtype, **sizes)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*", default=list(OP_MODULES))
    parser.add_argument("--sm", default="90", help="with commas: several")
    parser.add_argument("--dtype", default="bfloat16", help="with commas: several")
    parser.add_argument("--turns", metavar="OP", help="has each dtype for one sm, by turns")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, help="a kernel of few tokens takes other registers")
    parser.add_argument("--ones", action="store_true", help="every other size is 1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    sizes = {**(ONES if args.ones else {}), "head_dim": args.head_dim}
    if args.vocab is not None:
        sizes["vocab"] = args.vocab
    sms, dtypes = [int(sm) for sm in args.sm.split(",")], args.dtype.split(",")
    jobs = [
        (op, sm, dtype)
        for op, (i, sm), (j, dtype) in product(args.ops, enumerate(sms), enumerate(dtypes))
        if op != args.turns or j == i % len(dtypes)
    ]
    if len(jobs) == 1:
        print(*_lines(jobs[0], sizes), sep="\n")
        return
    # To import it all takes seconds, and here nothing but that was done.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(args.jobs, len(jobs)), mp_context=forked) as pool:
        for lines in pool.map(partial(_lines, sizes=sizes), jobs):
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
