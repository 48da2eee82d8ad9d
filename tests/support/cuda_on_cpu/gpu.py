"""A `launch.Gpu` that is a CPU."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from support.cuda_on_cpu.library import KERNELS, build
from tvr.backends.pycuda_raw.launch import Dim3, RawKernel
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError

STACK_BYTES = 256 << 10
MAX_THREADS = 1024

#: Libraries stay for the next run; each is found by a hash of its sources.
FOLDER = Path.home() / ".cache" / "tvr-cuda-on-cpu"


class _Request(ctypes.Structure):
    """`cuda_on_cpu::Request` of launch.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_int),
        ("num_tensors", ctypes.c_int),
        ("tensors", ctypes.c_void_p),
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_size_t),
        ("seed", ctypes.c_uint64),
    )


class CpuGpu:
    """A device on which every thread of a kernel runs on the CPU, one at a time.

    Args:
        sm: compute capability that host code is told.
        num_sms: multiprocessors that host code is told of.
        max_shared_bytes: most dynamic shared memory of a block.
        seed: of the order of blocks and warps; 0: the natural one.
        checked: refuse accesses outside of tensors, and races in shared memory.
        debug: compile for a debugger.
        folder: where compiled kernels are kept.
        kernels: folder of the sources.
    """

    def __init__(
        self,
        *,
        sm: int = 80,
        num_sms: int = 4,
        max_shared_bytes: int = 166912,
        seed: int = 1,
        checked: bool = False,
        debug: bool = False,
        folder: Path = FOLDER,
        kernels: Path = KERNELS,
    ) -> None:
        self.name = "cpu"
        self.sm = sm
        self.num_sms = num_sms
        self.max_shared_bytes = max_shared_bytes
        self._seed = seed
        self._checked = checked
        self._build = partial(build, folder=folder, kernels=kernels, checked=checked, debug=debug)
        self._lock = threading.Lock()
        self._loaded: dict[KernelVariant, ctypes.CDLL] = {}
        self._stacks = mmap.mmap(-1, MAX_THREADS * STACK_BYTES)  # untouched pages cost nothing
        self._stack_address = ctypes.addressof(ctypes.c_char.from_buffer(self._stacks))

    def load(self, variant: KernelVariant, params: str, shared_bytes: int) -> RawKernel:
        """Return the kernel, compiled if need be.

        Raises:
            KernelError: it does not compile, takes other parameters, or too much shared memory.
        """
        if shared_bytes > self.max_shared_bytes:
            raise KernelError(
                f"{variant.symbol}: {shared_bytes} bytes of shared memory; a block may have at "
                f"most {self.max_shared_bytes}"
            )
        if variant not in self._loaded:
            self._loaded[variant] = self._build(variant)
        library = self._loaded[variant]
        codes = library.kernel_codes().decode()
        if codes != params:
            raise KernelError(
                f"{variant.symbol} takes parameters of types {codes}; its Python side has {params}"
            )
        allowed = shared_bytes

        def launch(grid: Dim3, block: Dim3, shared_bytes: int, packed: bytes) -> None:
            _refuse_sizes(grid, block, shared_bytes, allowed)
            # The launcher's own arguments: `packed` says where tensors begin, but not where they
            # end.
            args = sys._getframe(1).f_locals["args"] if self._checked else ()
            spans = _spans(arg for arg in args if isinstance(arg, Tensor))
            request = _Request(
                grid=grid,
                block=block,
                shared_bytes=shared_bytes,
                num_tensors=len(spans) // 2,
                tensors=ctypes.addressof(spans),
                stacks=self._stack_address,
                stack_bytes=STACK_BYTES,
                seed=self._seed,
            )
            with self._lock:
                error = library.kernel_run(ctypes.byref(request), packed)
            if error is not None:
                raise KernelError(f"{variant.symbol}: {error.decode()}")

        return launch


def _refuse_sizes(grid: Dim3, block: Dim3, shared_bytes: int, allowed: int) -> None:
    """Refuse what CUDA refuses to launch."""
    if not (0 < grid[0] < 2**31 and 0 < grid[1] < 2**16 and 0 < grid[2] < 2**16):
        raise KernelError(f"a grid cannot be {grid}")
    if min(block) < 1 or block[0] * block[1] * block[2] > MAX_THREADS:
        raise KernelError(f"a block cannot be {block}")
    if shared_bytes > allowed:
        raise KernelError(f"{shared_bytes} bytes of shared memory; loaded with {allowed}")


def _spans(tensors: Iterable[Tensor]) -> ctypes.Array[ctypes.c_uint64]:
    """Return the first and the end of the addresses of each tensor's elements."""
    edges = []
    for x in tensors:
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        elements = last + 1 if x.numel() else 0
        edges += [x.data_ptr(), x.data_ptr() + elements * x.element_size()]
    return (ctypes.c_uint64 * len(edges))(*edges)
