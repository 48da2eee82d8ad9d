"""Compiles the Triton backend's kernels for GPUs that are not here.

    PYTHONPATH=tests:. python -m support.compile_triton [OP ...] [--sm 80,90] [--dtype bfloat16]

Each op is bound as on such a GPU and run on CPU tensors, but every launch is only compiled. One
line a kernel: registers, those that did not fit (spills), shared memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
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
    """A compiled kernel and what it takes."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes} bytes of shared memory"
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
        registers, spilled = resources(made.asm["cubin"], made.metadata.name)
        found = Compiled(
            made.metadata.name, registers, spilled, made.metadata.shared, made.asm["ptx"]
        )
        if found not in self.compiled:
            self.compiled.append(found)


def resources(cubin: bytes, name: str) -> tuple[int, int]:
    """Return registers and spilled bytes of a kernel, from the cubin's own section of facts."""
    import re
    import subprocess
    import tempfile

    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2])


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
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ones", action="store_true", help="every other size is 1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    sizes = {**(ONES if args.ones else {}), "head_dim": args.head_dim}
    sms = [int(sm) for sm in args.sm.split(",")]
    jobs = list(product(args.ops, sms, args.dtype.split(",")))
    if len(jobs) == 1:
        print(*_lines(jobs[0], sizes), sep="\n")
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(args.jobs, len(jobs)), mp_context=fresh) as pool:
        for lines in pool.map(partial(_lines, sizes=sizes), jobs):
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
