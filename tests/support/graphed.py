"""Engines on the CPU whose steps are graphs: tapes in place of CUDA's."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from support import tape
from support.engines import engine
from tvr.contract import Bounds
from tvr.core.chunk_graphs import padded
from tvr.core.ops import OpTable
from tvr.core.step_graphs import capture_steps


@contextmanager
def roomy(checkpoint, backend, *, first="graph_safe", more_plugins=(), **settings):
    """Yield an engine with room for graphs, and none yet.

    Args:
        checkpoint: the model.
        backend: returns a plugin.
        first: name of the backend to put first.
        more_plugins: rank before that one, if nobody is put first.
        settings: of the engine.
    """
    # A tape keeps every result of every graph: small steps, or it would be gigabytes.
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    settings = {**sizes, "dtype": "float32", "device": "cpu", **settings}
    allocate = OpTable.allocate
    with pytest.MonkeyPatch.context() as patch:
        # As on a GPU: workspaces have room for padding.
        patch.setattr(OpTable, "allocate", lambda ops, bounds: allocate(ops, padded(bounds)))
        settings = {"plugins": [*more_plugins, backend()], **settings}
        first = "auto" if more_plugins else first
        with engine(checkpoint, backend=first, **settings) as llm:
            yield llm


@contextmanager
def graphed(checkpoint, backend, *, capture=tape.capture, **settings):
    """Yield an engine whose steps of decodes are replays of a tape, and none of them eager."""
    with roomy(checkpoint, backend, **settings) as llm:
        capture_for(llm, lambda fn: capture(fn, None))
        yield llm


def capture_for(llm, capture):
    """Give an engine the graphs of its steps."""
    runner = llm._runner
    runner.graphs = capture_steps(
        runner._model,
        runner._ops,
        runner._step_ops,
        runner._kv_cache,
        runner._tables,
        runner._sampler,
        bounds_of(llm),
        capture,
    )


def bounds_of(llm):
    """Return the bounds of an engine's steps."""
    limits = llm.limits
    return Bounds(
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        max_seq_len=limits.max_model_len,
        max_q_len=min(limits.max_num_batched_tokens, limits.max_model_len),
    )
