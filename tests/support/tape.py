"""A stand-in for a CUDA graph on the CPU: records the ops of a function and runs them again.

Like a graph, it keeps addresses and forgets Python: a replay works on the very tensors of the
capture, every number that the host read is baked in, and to read one during the capture raises.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tvr.conformance.ledger import CheckFailed

_aten = torch.ops.aten

#: Ops that a device would have to be waited for: their result, or its shape, is the host's.
_SYNCS = {
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.is_nonzero,
    _aten.masked_select,
    _aten.nonzero,
}
#: The same, where torch reads CPU memory without an op, as `item` does in inference mode; and
#: copies from memory of the host's.
_HOST_READS = {
    torch.Tensor.cpu,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.as_tensor,
    torch.from_numpy,
    torch.tensor,
}


class Tape(TorchDispatchMode):
    """Runs ops and records them; `replay` runs them again, into the same memory."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in _SYNCS or _takes_by_mask(func, args):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self._calls:
            given = {_storage(t) for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # Views and outputs of in-place ops lie in the memory of an argument.
                if _is_tensor(old) and _storage(old) not in given:
                    old.copy_(new)


class _NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS:
            raise RuntimeError(f"{func.__name__}: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def capture(fn, device, stream=None):
    """As `tvr.conformance.graphs.capture`, for functions that compute with torch on the CPU."""
    fn()
    tape = Tape()
    # A capture launches nothing: what it writes here must not pass for a replay's work.
    with _capturing(tape):
        fn()
    return tape


@contextmanager
def _capturing(tape):
    try:
        with _NoHostReads(), tape:
            yield
    except RuntimeError as e:
        raise CheckFailed(f"cannot be captured: {e}") from e


def _takes_by_mask(func, args):
    """Whether the host must count a mask to know how many elements are meant."""
    if func.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
        return False
    return any(_is_tensor(i) and i.dtype == torch.bool for i in args[1])


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def _storage(x):
    return x.untyped_storage().data_ptr()
