"""Launches that begin before the kernel in front has ended: the CUDA driver through ctypes.

PyCUDA has no `cuLaunchKernelEx`, which takes the attribute for it (programmatic dependent launch),
and does not tell the handle of a function. So kernels launched this way are loaded here too.
"""

from __future__ import annotations

import ctypes
import struct
from threading import Lock

from tvr.backends.pycuda_raw.launch import Dim3, RawKernel
from tvr.errors import KernelError

LIBRARY = "libcuda.so.1"

#: Since then kernels may start early, and since then a captured graph keeps that they may.
MIN_SM, MIN_VERSION = 90, 12030

# Numbers of cuda.h.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`, of one whose value is an `int`."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """`CUlaunchConfig`; `sizes` are the grid, the block and the dynamic shared memory."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """The driver's library.

    Args:
        library: its file.

    Raises:
        KernelError: it cannot be loaded, or is too old.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            # Calls keep the interpreter's lock, as PyCUDA's do: a launch takes a microsecond, and
            # to get the lock back may take milliseconds where other threads are at work.
            found = ctypes.PyDLL(library)
            self._module_load = found.cuModuleLoadData
            self._module_get_function = found.cuModuleGetFunction
            self._set_attribute = found.cuFuncSetAttribute
            self._error_name = found.cuGetErrorName
            self._launch = found.cuLaunchKernelEx
        except (OSError, AttributeError) as error:
            raise KernelError(
                f"the CUDA driver has no overlapping launches ({error}); update it, or set "
                "pdl = false under [options.pycuda]"
            ) from error

    def load(
        self, cubin: bytes, symbol: str, codes: str, shared_bytes: int, stream: int
    ) -> RawKernel:
        """Return the kernel `symbol` of a cubin, which is launched on `stream`.

        It is loaded into the current context and never unloaded; any thread may launch it.

        Args:
            codes: the kernel's parameters as codes of `struct`.
            shared_bytes: most dynamic shared memory of a block.
            stream: a `CUstream`.

        Raises:
            KernelError: the driver refuses it; with the driver's words. The kernel that is returned
                raises the same.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", self._module_load(ctypes.byref(module), cubin))
        name = symbol.encode()
        code = self._module_get_function(ctypes.byref(function), module, name)
        self._check("cuModuleGetFunction", code)
        # Also makes the driver load the code now: at the first launch it would be too late if that
        # launch is being captured.
        code = self._set_attribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        self._check("cuFuncSetAttribute", code)
        return self._launcher(function, codes, stream)

    def _launcher(self, function: ctypes.c_void_p, codes: str, stream: int) -> RawKernel:
        """Return what launches `function`; all that the driver is given is made here, once."""
        attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = _Config(stream=stream, attributes=ctypes.pointer(attribute), num_attributes=1)
        # "0q" is the padding in front of a "q".
        offsets = [struct.calcsize(f"@{codes[:i]}0{code}") for i, code in enumerate(codes)]
        num_bytes = struct.calcsize(f"@{codes}")
        values = (ctypes.c_uint64 * -(-num_bytes // 8))()
        start = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(codes))(*(start + offset for offset in offsets))
        to_pack = memoryview(values).cast("B")[:num_bytes]
        config_at, pointers_at = ctypes.byref(config), ctypes.byref(pointers)
        pack_sizes = struct.Struct("7I").pack_into
        launch_kernel, check, lock = self._launch, self._check, Lock()

        def launch(grid: Dim3, block: Dim3, shared_bytes: int, packed: bytes) -> None:
            with lock:  # another thread may launch the same kernel
                pack_sizes(config, 0, *grid, *block, shared_bytes)
                to_pack[:] = packed
                code = launch_kernel(config_at, function, pointers_at, None)
            if code:
                check("cuLaunchKernelEx", code)

        return launch

    def _check(self, what: str, code: int) -> None:
        if not code:
            return
        name = ctypes.c_char_p()
        self._error_name(code, ctypes.byref(name))
        said = (name.value or b"an error that the driver has no name for").decode()
        raise KernelError(f"{what} failed: {said} ({code})")
