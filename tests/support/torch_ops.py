"""Run ops of the reference backend on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tvr.backends.torch_ref import plugin
from tvr.contract import DeviceFacts, OpSpec, StepMeta

CPU = DeviceFacts(type="cpu")


def bind(spec: OpSpec) -> Callable[..., object]:
    """Return `run` of the reference backend for `spec`."""
    bound = getattr(plugin, f"tvr_bind_{spec.op}")(spec=spec, device=CPU)
    assert bound is not None, spec
    return bound.run


def step_of(
    kv_lens: Sequence[int], block_table: Tensor, q_lens: Sequence[int] | None = None
) -> StepMeta:
    """Return the step of sequences with these lengths; q_lens None: one token each."""
    q_lens = [1] * len(kv_lens) if q_lens is None else q_lens
    edges = [0, *itertools.accumulate(q_lens)]
    return StepMeta(
        block_table=block_table.to(torch.int32),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor(edges, dtype=torch.int32),
        num_seqs=len(kv_lens),
        num_tokens=edges[-1],
        max_q_len=max(q_lens, default=0),
        max_seq_len=max(kv_lens, default=0),
        seq_lens_cpu=list(kv_lens),
    )
