"""Why the CUDA backend cannot run on a machine: no GPU, PyCUDA or nvcc, too old a driver."""

from __future__ import annotations

import torch

from tvr.backends.pycuda_raw.nvcc import find_nvcc
from tvr.backends.pycuda_raw.variants import MIN_SM
from tvr.contract import DeviceFacts
from tvr.errors import KernelError


def why_unavailable(device: DeviceFacts) -> list[str]:
    """Return all that is missing; empty: it can run on `device`.

    Where another device was chosen, that is the one reason.
    """
    torch_sees_one = torch.cuda.is_available()
    no_device = f"runs on CUDA devices, and torch {torch.__version__} sees none"
    if device.type != "cuda":
        return [f"runs on CUDA devices; this one is {device}" if torch_sees_one else no_device]
    reasons = [] if torch_sees_one else [no_device]
    driver: tuple[int, int] | None = None
    try:
        import pycuda.driver as cuda

        cuda.init()
        version = cuda.get_driver_version()
        driver = (version // 1000, version % 1000 // 10)
    except ImportError as error:
        # Also where PyCUDA is there and libcuda is not.
        reasons.append(
            f"pycuda cannot be imported ({error}); install it: pip install 'tvr[pycuda]'"
        )
    except cuda.Error as error:
        reasons.append(f"pycuda cannot start CUDA: {error}")
    if device.sm is not None and device.sm < MIN_SM:
        reasons.append(f"needs a GPU of sm_{MIN_SM} or later; {device.name} is sm_{device.sm}")
    try:
        nvcc = find_nvcc()
        nvcc.require(max(device.sm or 0, MIN_SM))
    except KernelError as error:
        return [*reasons, str(error)]
    # A driver runs code of its own major version, whatever the minor.
    if driver is not None and driver[0] < nvcc.version[0]:
        reasons.append(
            f"the driver is for CUDA {driver[0]}.{driver[1]} and nvcc is {nvcc.version[0]}."
            f"{nvcc.version[1]} ({nvcc.path}); update the driver, or put an nvcc of CUDA "
            f"{driver[0]} on PATH"
        )
    return reasons
