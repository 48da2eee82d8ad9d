"""Why the Triton backend cannot run here."""

from __future__ import annotations

import importlib.util
import re
import sys

import numpy

from tvr.contract import DeviceFacts
from tvr.errors import PluginError

MIN_SM = 80
MIN_TRITON = (3, 5)

#: The interpreter of older Tritons takes arrays of one element for numbers; newer NumPys do not.
MIN_TRITON_OF_NEW_NUMPY = (3, 7)
NEW_NUMPY = (2, 4)


def why_unavailable(device: DeviceFacts) -> list[str]:
    """Return the reasons, one line each; empty: it can run."""
    if reasons := why_no_triton():
        return reasons
    return [*why_not_on(device), *_why_no_table()]


def why_no_triton() -> list[str]:
    """Return why there is no Triton that the kernels could be written in."""
    if importlib.util.find_spec("triton") is None:
        if sys.platform != "linux":
            return [f"Triton is not made for {sys.platform}, only for Linux"]
        return ["Triton is not installed: pip install 'tvr[triton]'"]
    try:
        import triton
    except ImportError as error:
        reason = " ".join(str(error).split())
        return [f"Triton cannot be imported ({reason}): pip install --force-reinstall triton"]
    if release(triton.__version__) < MIN_TRITON:
        return [
            f"needs Triton 3.5 or newer, {triton.__version__} is installed: "
            "pip install 'triton>=3.5'"
        ]
    return []


def why_not_on(device: DeviceFacts) -> list[str]:
    """Return why the Triton that is installed cannot run kernels on `device`."""
    from tvr.backends.triton.launch import is_interpreted

    if device.type == "cpu":
        reasons = _why_no_interpreter()
        if not is_interpreted():
            reasons = [
                "on a CPU it runs under Triton's interpreter only: set TRITON_INTERPRET=1",
                *reasons,
            ]
        return reasons
    if is_interpreted():
        return ["TRITON_INTERPRET is set, and the interpreter runs on the CPU only: unset it"]
    if device.index is None:
        return ["no CUDA device is here"]
    if (device.sm or 0) < MIN_SM:
        return [f"needs sm_{MIN_SM} or newer, the device is sm_{device.sm}"]
    return []


def _why_no_interpreter() -> list[str]:
    import triton

    found = triton.__version__
    if release(found) >= MIN_TRITON_OF_NEW_NUMPY or release(numpy.__version__) < NEW_NUMPY:
        return []
    return [
        f"the interpreter of Triton {found} fails with NumPy 2.4 and newer, {numpy.__version__} is "
        "installed: pip install 'numpy<2.4', or 'triton>=3.7'"
    ]


def _why_no_table() -> list[str]:
    from tvr.backends.triton.configs import shipped

    try:
        shipped()
    except PluginError as error:
        return [str(error)]
    return []


def release(version: str) -> tuple[int, ...]:
    """Return (3, 6) for "3.6.0+git12"."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
