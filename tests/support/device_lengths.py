"""The reference's attention as in a captured step: by the lengths on the device.

The host's lengths are bounds there. The reference cannot be captured, so it is run again.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from tvr.backends.torch_ref import attention


def rerun(fn, device=None, stream=None):
    """Return what stands for the graph of `fn`: its `replay` calls it."""
    return SimpleNamespace(replay=fn)


def go_by_the_device(monkeypatch):
    """Have the reference's attention read the lengths from the device, until the test ends."""
    for name in ("bind_decode", "bind_prefill"):
        monkeypatch.setattr(attention, name, _by_the_device(getattr(attention, name)))


def _by_the_device(bind):
    def bound(spec):
        right = bind(spec)

        def run(*args, **kwargs):
            *tensors, step = args
            lens = step.seq_lens.tolist()
            step = replace(step, seq_lens_cpu=lens, max_seq_len=max(lens))
            return right.run(*tensors, step, **kwargs)

        return replace(right, run=run)

    return bound
