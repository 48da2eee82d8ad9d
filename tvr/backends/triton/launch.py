"""Where kernels run: a GPU, or the CPU under Triton's interpreter.

A kernel is a `@triton.jit` function with its constants and its `Config`. How it reaches a device
is behind `Gpu`, so that tests can compile kernels for GPUs that are not here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tvr.backends.triton.interpreter import Interpreter
from tvr.errors import KernelError

_LOG = logging.getLogger(__name__)

#: Since then a kernel may start before the one that it depends on has ended.
PDL_MIN_SM = 90


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
    ) -> None:
        """Launch a jitted function on the current stream of `device`."""
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
        _log_compilations()

    def launch(
        self,
        kernel: Any,  # noqa: ANN401
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Launch on the current stream of this device, whichever device is current."""
        if torch.cuda.current_device() == self._index:
            kernel[grid](*args, **constants, **options)
        else:
            with torch.cuda.device(self._index):
                kernel[grid](*args, **constants, **options)


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
            self._gpu.launch(self._function, grid, args, self._constants, self._options)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise KernelError(
                f"{self._name}: launch of {' x '.join(map(str, grid))} programs failed: "
                f"{type(error).__name__}: {reason}"
            ) from error
