"""Compiles the Triton backend's kernels for GPUs that are not here.

    PYTHONPATH=tests:. python -m support.compile_triton [OP ...] [--sm 90] [--dtype bfloat16]

Each op is bound as on such a GPU and run on CPU tensors, but every launch is only compiled. One
line a kernel: registers that did not fit (spills), shared memory, size of the code.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from support.op_calls import calls
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
        return 0

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


def compile_op(op: str, sm: int, dtype: str, **shape: Any) -> list[Compiled]:
    """Return the kernels that `op` launches for common shapes."""
    gpu = AbsentGpu(sm)
    for spec, call in calls(op, dtype, **shape):
        call(bind(spec, gpu))
    return gpu.compiled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*", default=list(OP_MODULES))
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    for op in args.ops:
        for kernel in compile_op(op, args.sm, args.dtype):
            print(f"{op}  {kernel}")


if __name__ == "__main__":
    main()
