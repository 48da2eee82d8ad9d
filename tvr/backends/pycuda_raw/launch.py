"""Typed launchers: what a kernel is given is checked, packed and launched here.

How a kernel reaches a device is behind `Gpu`: `device.py` has the one that uses PyCUDA.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError

Dim3 = tuple[int, int, int]

#: Launches a loaded kernel: grid, block, dynamic shared memory in bytes, packed parameters.
RawKernel = Callable[[Dim3, Dim3, int, bytes], None]


class Gpu(Protocol):
    """A device that kernels are loaded on.

    Attributes:
        name: as torch has it: "cuda:0".
        sm: compute capability, major * 10 + minor.
        num_sms: multiprocessors.
        max_shared_bytes: most dynamic shared memory of a block.
    """

    name: str
    sm: int
    num_sms: int
    max_shared_bytes: int

    def load(self, variant: KernelVariant, params: str, shared_bytes: int) -> RawKernel:
        """Return the kernel, compiled if need be and allowed that much dynamic shared memory.

        Args:
            params: the kernel's parameters as codes of `struct`, one a parameter.
        """
        ...


@dataclass(frozen=True)
class Param:
    """A kernel's parameter.

    Attributes:
        name: as in the source.
        code: `struct`'s code of it: "P" pointer, "i" int32, "q" int64, "f" float32.
        dtype: of the tensor a pointer points to, in the contract's words.
        optional: a pointer that may be None.
        inner: dimensions of the tensor, the last ones, that must be contiguous together: those
            whose strides the kernel is not given.
        alignment: bytes that the address must be a multiple of.
    """

    name: str
    code: str
    dtype: str = ""
    optional: bool = False
    inner: int = 1
    alignment: int = 1


def tensor(
    name: str, dtype: str, *, optional: bool = False, inner: int = 1, alignment: int = 1
) -> Param:
    """A pointer to a tensor whose last `inner` dimensions are contiguous."""
    return Param(name, "P", dtype, optional, inner, alignment)


def int32(name: str) -> Param:
    """An `int`."""
    return Param(name, "i")


def int64(name: str) -> Param:
    """An `int64_t`; strides are in elements."""
    return Param(name, "q")


def float32(name: str) -> Param:
    """A `float`."""
    return Param(name, "f")


def refuse_more_rows(op: str, x: Tensor, most: int) -> None:
    """Refuse an x [T, ...] with more rows than a kernel takes.

    Raises:
        KernelError: T is above `most`.
    """
    if len(x) > most:
        raise KernelError(
            f"{op}: x has {len(x)} rows; this kernel takes at most {most}: "
            "bind another backend for more"
        )


class Kernel:
    """A loaded kernel with the types of its parameters.

    Args:
        gpu: where it is loaded.
        variant: which one.
        params: in the order of the source.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(
        self,
        gpu: Gpu,
        variant: KernelVariant,
        params: Sequence[Param],
        *,
        block: int,
        shared_bytes: int = 0,
    ) -> None:
        self._name = variant.symbol
        self._device = torch.device(gpu.name)
        self._params = tuple(params)
        self._dtypes = tuple(getattr(torch, p.dtype) if p.dtype else None for p in params)
        self._block = (block, 1, 1)
        self._shared_bytes = shared_bytes
        codes = "".join(p.code for p in params)
        # Native alignment ("@") is that of a C struct, and of a kernel's parameters.
        self._pack = struct.Struct("@" + codes).pack
        self._launch = gpu.load(variant, codes, shared_bytes)

    def __call__(self, grid: tuple[int, ...], *args: Tensor | float | None) -> None:
        """Launch `grid` blocks (x, or x and y and z) with one argument for each parameter.

        Raises:
            KernelError: a tensor of another dtype, on another device, with strides that the kernel
                does not expect, or at an address that it cannot use; or the launch was refused.
                The kernel is named.
        """
        if 0 in grid:
            return  # a step of no tokens is legal, a grid of no blocks is not
        values = [
            arg if dtype is None else self._address(param, dtype, arg)
            for param, dtype, arg in zip(self._params, self._dtypes, args, strict=True)
        ]
        x, y, z = (*grid, 1, 1)[:3]
        try:
            self._launch((x, y, z), self._block, self._shared_bytes, self._pack(*values))
        except Exception as error:
            raise KernelError(
                f"{self._name}: launch of {x} x {y} x {z} blocks of {self._block[0]} threads and "
                f"{self._shared_bytes} bytes of shared memory failed: {error}"
            ) from error

    def _address(self, param: Param, dtype: torch.dtype, arg: Any) -> int:  # noqa: ANN401
        """Return the address of a tensor that fits `param`."""
        if arg is None and param.optional:
            return 0
        if not isinstance(arg, Tensor):
            raise self._refusal(param, f"is {arg!r}", "it must be a tensor")
        if arg.dtype != dtype:
            raise self._refusal(param, f"is {arg.dtype}", f"the kernel was built for {dtype}")
        if arg.device != self._device:
            raise self._refusal(param, f"is on {arg.device}", f"the kernel is on {self._device}")
        if arg.dim() and arg.stride(-1) != 1 and arg.shape[-1] > 1:
            found = f"has stride {arg.stride(-1)} in its last dimension"
            raise self._refusal(param, found, "that must be contiguous")
        if param.inner > 1 and not (arg.is_contiguous() or _is_packed(arg, param.inner)):
            found = f"{tuple(arg.shape)} has strides {arg.stride()}"
            wanted = f"its last {param.inner} dimensions must be contiguous"
            raise self._refusal(param, found, wanted)
        address = arg.data_ptr()
        if address % param.alignment:
            raise self._refusal(
                param,
                f"begins {address % param.alignment} bytes behind a multiple of {param.alignment}",
                "it is written so many at a time: give a tensor that begins at one",
            )
        return address

    def _refusal(self, param: Param, found: str, wanted: str) -> KernelError:
        return KernelError(f"{self._name}: {param.name} {found}; {wanted}")


def _is_packed(x: Tensor, inner: int) -> bool:
    """Return whether the last `inner` dimensions of a tensor are contiguous together."""
    expected = 1
    for size, stride in zip(x.shape[: -inner - 1 : -1], x.stride()[: -inner - 1 : -1], strict=True):
        if stride != expected and size != 1:
            return False
        expected *= size
    return True
