"""CUDA devices through PyCUDA: the context, the stream and the loading of kernels.

PyCUDA's `Stream` cannot take over a stream of torch's, so it is the other way round: PyCUDA makes
the stream and torch borrows it (`torch.cuda.ExternalStream`). It does not block on the legacy
default stream, as a graph capture requires.

PyCUDA keeps a stack of contexts for each thread and aborts the process if a thread ends with one
on it. So the primary context, the one torch uses, is pushed only around what PyCUDA needs it for,
and popped at once; launches run on the context that torch has made current.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from tvr.backends.pycuda_raw.compile import compile_variant
from tvr.backends.pycuda_raw.launch import Dim3, RawKernel
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError

_OPENING = Lock()  # two engines that start at once must get one and the same stream


def open_gpu(index: int, cache_dir: Path | None = None) -> CudaGpu:
    """Return the process's one `CudaGpu` of a device and a cache, made at the first call."""
    with _OPENING:
        return _open(index, cache_dir)


@cache
def _open(index: int, cache_dir: Path | None) -> CudaGpu:
    return CudaGpu(index, cache_dir)


class CudaGpu:
    """A `launch.Gpu` whose kernels are launched by PyCUDA on a stream of its own.

    Attributes:
        stream: that stream as torch has it.
    """

    def __init__(self, index: int, cache_dir: Path | None) -> None:
        import pycuda.driver as cuda

        # Torch first: it makes the primary context as it wants it.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.empty(1, device=f"cuda:{index}")
        cuda.init()
        device = cuda.Device(index)
        properties = torch.cuda.get_device_properties(index)
        self.name = f"cuda:{index}"
        self.sm: int = properties.major * 10 + properties.minor
        self.num_sms: int = properties.multi_processor_count
        self.max_shared_bytes: int = device.get_attribute(
            cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        )
        self._cuda = cuda
        self._cache_dir = cache_dir
        self._context = _immortal(device.retain_primary_context())
        with self._current():
            self._stream = _immortal(cuda.Stream(_NON_BLOCKING))
        self.stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            self._stream.handle, device=self.name
        )
        self._kernels: dict[tuple[KernelVariant, int], RawKernel] = {}

    def load(self, variant: KernelVariant, params: str, shared_bytes: int) -> RawKernel:
        """Return a kernel, compiled if need be; `params` is not needed by PyCUDA.

        Raises:
            CompileError: the source does not compile.
            KernelError: the driver does not take the compiled kernel.
        """
        key = (variant, shared_bytes)
        if key not in self._kernels:
            cubin = compile_variant(variant, self.sm, cache_dir=self._cache_dir)
            self._kernels[key] = self._load(cubin, variant.symbol, shared_bytes)
        return self._kernels[key]

    def _load(self, cubin: Path, symbol: str, shared_bytes: int) -> RawKernel:
        """Return the kernel of a compiled module, on this device's stream."""
        attribute = self._cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        try:
            with self._current():
                module = _immortal(self._cuda.module_from_file(str(cubin)))
                function = module.get_function(symbol)
                # Also makes the driver load the code now: at the first launch it would be too
                # late if that launch is being captured.
                function.set_attribute(attribute, shared_bytes)
        except self._cuda.Error as error:
            raise KernelError(
                f"{symbol} was compiled, and the driver of {self.name} refuses {cubin}: {error}; "
                "is the driver older than nvcc, or the GPU another?"
            ) from error
        # What PyCUDA's own prepared calls end in; they would pack the parameters once more.
        launch_on, stream = function._launch_kernel, self._stream

        def launch(grid: Dim3, block: Dim3, shared_bytes: int, packed: bytes) -> None:
            launch_on(grid, block, packed, shared_bytes, stream)

        return launch

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the primary context PyCUDA's current one, for as short a time as can be."""
        self._context.push()
        try:
            yield
        finally:
            self._cuda.Context.pop()


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def _immortal(thing: Any) -> Any:  # noqa: ANN401
    """Return a PyCUDA object that will never be freed.

    PyCUDA frees in whichever thread drops the last reference and complains if that is not the one
    that made it, or if torch has already shut CUDA down. Context, stream and modules serve until
    the process ends, and the driver cleans up after it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
