"""The CUDA backend with its kernels run on the CPU: a plugin for the conformance suite."""

from __future__ import annotations

from support.cuda_on_cpu.gpu import CpuGpu
from tvr.backends.pycuda_raw.plugin import PycudaBackend, backend_info
from tvr.contract import DeviceFacts
from tvr.hookspecs import hookimpl


class PycudaOnCpu(PycudaBackend):
    """The same bind hooks and kernels on another `Gpu`. There are no graphs to capture."""

    def __init__(self, gpu: CpuGpu | None = None) -> None:
        super().__init__()
        self._info = backend_info(
            "pycuda_on_cpu", ("cpu",), frozenset({"deterministic", "batch_invariant"})
        )
        self._cpu_gpu = gpu or CpuGpu()

    @hookimpl
    def tvr_probe(self, device: DeviceFacts) -> list[str]:
        return []

    def _gpu(self, device: DeviceFacts) -> CpuGpu:
        return self._cpu_gpu
