"""Where kernels run: a GPU, or the CPU under Triton's interpreter.

A kernel is a `@triton.jit` function with its constants and its `Config`. How it reaches a device
is behind `Gpu`, so that tests can compile kernels for GPUs that are not here.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tvr.backends.triton.interpreter import Interpreter
from tvr.errors import KernelError

_LOG = logging.getLogger(__name__)

#: Since then a kernel may start before the one that it depends on has ended.
PDL_MIN_SM = 90

#: Registers of a multiprocessor, and bytes of a block's shared memory that the driver takes (CUDA
#: programming guide, compute capabilities from 8.0 on).
_REGISTERS, _SHARED_BYTES_OF_DRIVER = 65536, 1024
#: CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT.
_PREFERRED_SHARED_PERCENT = 9


@dataclass(frozen=True)
class Config:
    """How a kernel is compiled.

    Attributes:
        num_warps: warps of a program.
        num_stages: tiles of a loop that are on their way at once.
        blocks: sizes of tiles, as the kernel's constants name them.
    """

    num_warps: int = 4
    num_stages: int = 3
    blocks: Mapping[str, int] = field(default_factory=dict)


class Gpu(Protocol):
    """A device that kernels run on.

    Attributes:
        device: as torch has it.
        sm: compute capability, major * 10 + minor; 0 under the interpreter.
        num_sms: multiprocessors.
        pdl: kernels may be launched early (programmatic dependent launch), and then wait.
    """

    device: torch.device
    sm: int
    num_sms: int
    pdl: bool

    def launch(
        self,
        kernel: Any,  # noqa: ANN401
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Launch a jitted function on the current stream of `device`; return what was compiled."""
        ...

    def leave_to_l1(self, compiled: Any) -> None:  # noqa: ANN401
        """Give a kernel's later launches all memory of a multiprocessor as L1 that can be.

        Multiprocessors split one memory into shared memory and L1 cache. Between kernels that
        overlap the driver keeps the split of the first, unless the next one says what it wants.
        """
        ...


class CudaGpu:
    """An NVIDIA GPU."""

    def __init__(self, index: int) -> None:
        found = torch.cuda.get_device_properties(index)
        self.device = torch.device("cuda", index)
        self.sm = found.major * 10 + found.minor
        self.num_sms = found.multi_processor_count
        self.pdl = self.sm >= PDL_MIN_SM
        self._index = index
        self._most_threads: int = found.max_threads_per_multi_processor
        self._shared_bytes: int = found.shared_memory_per_multiprocessor
        self._left_to_l1: WeakSet[Any] = WeakSet()
        _log_compilations()

    def launch(
        self,
        kernel: Any,  # noqa: ANN401
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Launch on the current stream of this device, whichever device is current."""
        if torch.cuda.current_device() == self._index:
            return kernel[grid](*args, **constants, **options)
        with torch.cuda.device(self._index):
            return kernel[grid](*args, **constants, **options)

    def leave_to_l1(self, compiled: Any) -> None:  # noqa: ANN401
        """Ask for as much shared memory as the blocks that fit use, and L1 for the rest.

        It is asked for once a kernel. Where the driver refuses, kernels are slower and as right: a
        warning is logged.
        """
        if compiled in self._left_to_l1:
            return
        self._left_to_l1.add(compiled)
        threads = 32 * compiled.metadata.num_warps
        registers = -(-compiled.n_regs // 8) * 8 * threads  # threads get them by eights
        shared = compiled.metadata.shared + _SHARED_BYTES_OF_DRIVER
        limits = (_REGISTERS // registers, self._most_threads // threads)
        fit = max(min(*limits, self._shared_bytes // shared), 1)
        # The driver takes the next larger split that there is, so not a byte more than is used.
        percent = max(round(100 * fit * shared / self._shared_bytes), 1)
        function = ctypes.c_void_p(compiled.function)
        with torch.cuda.device(self._index):
            error = _driver().cuFuncSetAttribute(function, _PREFERRED_SHARED_PERCENT, percent)
        if error:
            _LOG.warning(
                "%s: the driver of %s refuses to split a multiprocessor's memory at %d%%: CUDA "
                "error %d; products will be slower",
                *(compiled.metadata.name, self.device, percent, error),
            )


@cache
def _driver() -> ctypes.CDLL:
    """Return CUDA's driver, which Triton has loaded; Triton does not pass this wish on."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _log_compilations() -> None:
    """Log each kernel that Triton compiles: it takes seconds, and whoever waits can be told."""
    other = triton.knobs.compilation.listener

    def listener(*, metadata: dict[str, Any], cache_hit: bool, **more: Any) -> None:  # noqa: ANN401
        if other is not None:
            other(metadata=metadata, cache_hit=cache_hit, **more)
        if not cache_hit:
            _LOG.info("compiled %s", metadata["name"])

    triton.knobs.compilation.listener = listener


@cache
def open_gpu(device: str) -> Gpu:
    """Return the device that torch calls "cpu" or "cuda:0"."""
    found = torch.device(device)
    if found.type == "cpu":
        return Interpreter()
    assert found.index is not None, "core gives CUDA devices with their index"
    return CudaGpu(found.index)


def is_interpreted() -> bool:
    """Whether kernels decorated from now on run in the interpreter (`TRITON_INTERPRET=1`)."""
    return bool(triton.knobs.runtime.interpret)


class Kernel:
    """A jitted function that is launched with its constants.

    Args:
        gpu: where it runs.
        function: what `@triton.jit` made. It takes `PDL` as a constant, and waits for its inputs
            where that is true (`wait_for_inputs` in device.py).
        config: how it is compiled.
        max_registers: of a thread; None: as many as the compiler likes.
        constants: its other constants by name.
    """

    def __init__(
        self,
        gpu: Gpu,
        function: Any,  # noqa: ANN401
        config: Config,
        *,
        max_registers: int | None = None,
        **constants: Any,  # noqa: ANN401
    ) -> None:
        self._gpu = gpu
        self._device = gpu.device
        self._function = function
        self._l1 = False
        self._name: str = function.__name__
        self._constants = {**config.blocks, **constants, "PDL": gpu.pdl}
        self._options: dict[str, Any] = {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            # Said aloud: newer Tritons change what they do unasked.
            "enable_fp_fusion": True,
        }
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        if gpu.pdl:
            self._options["launch_pdl"] = True

    def unfused(self) -> Kernel:
        """Return this kernel with every product rounded before it is added to."""
        other = copy(self)
        other._options = {**self._options, "enable_fp_fusion": False}
        return other

    def with_l1(self) -> Kernel:
        """Return this kernel with the most L1 cache: its programs read the same things."""
        other = copy(self)
        other._l1 = True
        return other

    def __call__(self, grid: tuple[int, ...], *args: Tensor | float | None) -> None:
        """Launch `grid` programs, one argument for each parameter that is no constant.

        Raises:
            KernelError: a tensor is on another device, or the launch was refused. The kernel is
                named.
        """
        if 0 in grid:
            return  # a step of no tokens is legal, a grid of no programs is not
        for arg in args:
            tensor = arg.base if isinstance(arg, TensorDescriptor) else arg
            if isinstance(tensor, Tensor) and tensor.device != self._device:
                raise KernelError(
                    f"{self._name}: a tensor is on {tensor.device}; "
                    f"the op is bound on {self._device}"
                )
        try:
            compiled = self._gpu.launch(self._function, grid, args, self._constants, self._options)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise KernelError(
                f"{self._name}: launch of {' x '.join(map(str, grid))} programs failed: "
                f"{type(error).__name__}: {reason}"
            ) from error
        if self._l1:
            self._gpu.leave_to_l1(compiled)
