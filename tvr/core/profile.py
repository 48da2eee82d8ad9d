"""Small steps that no request asked for: what they compile, the first requests need not wait for.

`largest_steps.py` has the large ones, made of the same pieces.
"""

from __future__ import annotations

import numpy as np

from tvr.contract import Bounds
from tvr.core.batch import PackedStep
from tvr.core.decode_inputs import PackedDecodes
from tvr.core.runner import ModelRunner
from tvr.core.sampler_state import RowState
from tvr.core.sampling_params import MAX_LOGPROBS, SamplingParams

#: What grows with the context grows with its keys: a short chunk at its end shows that, in a
#: fraction of the time of a long one.
TAIL_TOKENS = 64

#: Rows for which kernels of their own are made: those of `linear` for few rows.
WARM_UP_DECODES = (1, 2, 4, 8, 16)

GREEDY = SamplingParams(temperature=0.0)

#: Every stage of sampling, at its dearest.
DEAREST = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    presence_penalty=0.5,
    min_tokens=1,
    stop_token_ids=[1],
    allowed_token_ids=[0],
    logprobs=MAX_LOGPROBS,
)


def warm_up(runner: ModelRunner, bounds: Bounds, block_size: int, num_blocks: int) -> None:
    """Run a small step of each kind, so that no request waits for a kernel to be compiled.

    Kernels for few rows differ from those for many, so decodes come in several counts. Steps are
    launched as those of requests are: by a graph that holds them, so that nothing runs op by op
    which ran so when it was captured. What they leave in the pool belongs to no sequence, and rows
    are reset when they are handed out.
    """
    counts = sorted({min(n, bounds.max_num_seqs) for n in (*WARM_UP_DECODES, bounds.max_num_seqs)})
    chunk = min(TAIL_TOKENS, bounds.max_q_len)
    for params in (GREEDY, DEAREST):
        resets = states_of(bounds.max_num_seqs, params)
        runner.submit(pack_chunks([(0, chunk)], block_size, num_blocks), resets)()
        for n in counts:
            if runner.holds(n):
                runner.submit_decodes(_decodes(n, chunk - 1))()
                continue
            decodes = [(chunk - 1, 1)] * n
            runner.submit(pack_chunks(decodes, block_size, num_blocks, num_decodes=n), [])()


def _decodes(num_seqs: int, position: int) -> PackedDecodes:
    """Return a step of decodes at one position, for a graph; it adds no blocks."""
    rows = list(range(num_seqs))
    data = np.array([(row, position, -1) for row in rows], dtype=np.int32)
    return PackedDecodes(data=data, rows=rows)


def states_of(num_rows: int, params: SamplingParams) -> list[RowState]:
    """Return the states of rows that have made no token."""
    return [
        RowState(row=i, params=params, seed=i, prompt_token_ids=[0], output_token_ids=[])
        for i in range(num_rows)
    ]


def pack_chunks(
    chunks: list[tuple[int, int]], block_size: int, num_blocks: int, *, num_decodes: int = 0
) -> PackedStep:
    """Return a step of chunks (start, length) that each sample; the first may be decodes.

    Sequence i takes row i. All token ids are 0. Blocks are handed out in turn, and again from 0
    when `num_blocks` are gone.
    """
    starts, lengths = np.array(chunks).T
    ends = starts + lengths
    counts = -(-ends // block_size)
    rows = np.arange(len(chunks))
    data = [
        rows,
        starts,
        lengths,
        rows,  # every entry samples
        np.zeros(sum(lengths) - num_decodes),  # token ids; a decode's is on the device
        np.repeat(rows, counts),
        np.concatenate([np.arange(n) for n in counts]),
        np.arange(sum(counts)) % num_blocks,
    ]
    return PackedStep(
        data=np.concatenate(data).astype(np.int32),
        num_seqs=len(chunks),
        num_decodes=num_decodes,
        num_samples=len(chunks),
        num_prefill_tokens=int(sum(lengths)) - num_decodes,
        seq_lens=ends.tolist(),
        q_lens=lengths.tolist(),
        sample_rows=rows.tolist(),
    )
