"""What this device's memory gives at best: a plain copy and a plain read by torch."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tvr.bench.timer import make_timer

if TYPE_CHECKING:
    from tvr.bench.buffers import Buffers

_GPU_BYTES = 1 << 30
_CPU_BYTES = 32 << 20
_LAUNCHES = 4
_SAMPLES = 20
_COLUMNS = 16384
_PATIENCE_S = 20.0  # with nvidia-smi

#: What each figure of `ceilings` is.
METHODS = {
    "copy_tb_s": "x.copy_(y) by torch, bytes read and written",
    "read_tb_s": "x.sum(dim=1) by torch of fp32, bytes read",
}


def ceilings(buffers: Buffers, dtype: torch.dtype, gpu: str | None = None) -> dict[str, object]:
    """Return bandwidths in TB/s, the bytes of an operand, and the clocks meanwhile.

    Args:
        buffers: their largest are used, random numbers as ever.
        dtype: of the buffers.
        gpu: nvidia-smi's name of the device; None: a CPU.
    """
    on_gpu = buffers.device.type == "cuda"
    num_bytes = _CPU_BYTES
    if on_gpu:
        memory = torch.cuda.get_device_properties(buffers.device).total_memory
        num_bytes = min(_GPU_BYTES, memory // 16 // (4 * _COLUMNS) * 4 * _COLUMNS)
    shape = (num_bytes // dtype.itemsize,)
    source = buffers.normal("kv", shape, dtype)
    target = buffers.unfilled("out", shape, dtype)
    wide = source.view(torch.float32).view(-1, _COLUMNS)
    sums = torch.empty(len(wide), device=buffers.device)
    stream = torch.cuda.Stream(buffers.device) if on_gpu else None  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.synchronize(buffers.device)
    copy = make_timer([lambda: target.copy_(source)] * _LAUNCHES, stream)
    read = make_timer([lambda: torch.sum(wide, dim=1, out=sums)] * _LAUNCHES, stream)
    found: dict[str, object] = {
        "copy_tb_s": round(2 * num_bytes / statistics.median(copy.sample(_SAMPLES)) / 1e6, 4),
        "read_tb_s": round(num_bytes / statistics.median(read.sample(_SAMPLES)) / 1e6, 4),
        "bytes": num_bytes,
        "methods": METHODS,
    }
    if gpu is not None:
        found |= _clocks(gpu, lambda: copy.sample(1))
    return found


def _clocks(gpu: str, work: Callable[[], object]) -> dict[str, object]:
    """Return the clocks as found while the device works; an idle one's say nothing."""
    fields = {
        "sm_clock_mhz": "clocks.sm",
        "max_sm_clock_mhz": "clocks.max.sm",
        "memory_clock_mhz": "clocks.mem",
    }
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields.values())}"]
    try:
        asked = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        began = time.monotonic()
        while asked.poll() is None and time.monotonic() - began < _PATIENCE_S:
            work()
        asked.kill()  # nothing, unless it hangs
        values = [int(value) for value in asked.communicate()[0].split(",")]
        return dict(zip(fields, values, strict=True))
    except (OSError, ValueError):  # there is no nvidia-smi, or it does not know all of them
        return dict.fromkeys(fields)
