"""Why the Triton backend cannot run here."""

from __future__ import annotations

import importlib.util
import sys

from tvr.contract import DeviceFacts

MIN_SM = 80


def why_unavailable(device: DeviceFacts) -> list[str]:
    """Return the reasons, one line each; empty: it can run."""
    if importlib.util.find_spec("triton") is None:
        if sys.platform != "linux":
            return [f"Triton is not made for {sys.platform}, only for Linux"]
        return ["Triton is not installed: pip install 'tvr[triton]'"]
    from tvr.backends.triton.launch import is_interpreted

    if device.type == "cpu":
        if is_interpreted():
            return []
        return ["on a CPU it runs under Triton's interpreter only: set TRITON_INTERPRET=1"]
    if is_interpreted():
        return ["TRITON_INTERPRET is set, and the interpreter runs on the CPU only: unset it"]
    if device.index is None:
        return ["no CUDA device is here"]
    if (device.sm or 0) < MIN_SM:
        return [f"needs sm_{MIN_SM} or newer, the device is sm_{device.sm}"]
    return []
