"""Steps that no request asked for: the largest ones show what an engine takes besides the KV pool,
small ones compile what the first requests would otherwise wait for."""

from __future__ import annotations

import numpy as np
import torch

from tvr.contract import Bounds
from tvr.core.batch import DeviceTables, PackedStep
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.runner import ModelRunner
from tvr.core.sampler import SamplerState
from tvr.core.sampler_state import RowState
from tvr.core.sampling_params import MAX_LOGPROBS, SamplingParams
from tvr.core.step_ops import StepOps

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


def run_largest_steps(
    model: LlamaForCausalLM,
    ops: OpTable,
    step_ops: StepOps,
    bounds: Bounds,
    block_size: int,
    device: torch.device,
) -> int:
    """Run the largest steps there can be on a pool just large enough; return the pool's bytes.

    They are one long chunk, as many sequences as there may be with all the tokens shared out
    among them, and a chunk at the end of the longest sequence; each samples in the dearest way.
    """
    longest, tail = bounds.max_q_len, min(bounds.max_q_len, TAIL_TOKENS)
    share, more = divmod(bounds.max_num_tokens, bounds.max_num_seqs)
    steps = [
        [(0, longest)],
        [(0, min(share + (i < more), longest)) for i in range(bounds.max_num_seqs)],
        [(bounds.max_seq_len - tail, tail)],
    ]
    num_blocks = max(sum(-(-n // block_size) for _, n in chunks) for chunks in steps)
    kv_cache = KVCache.allocate(
        model.config, num_blocks, block_size, dtype=model.logits_dtype, device=device
    )
    tables = DeviceTables(
        num_rows=bounds.max_num_seqs,
        max_model_len=bounds.max_seq_len,
        block_size=block_size,
        device=device,
    )
    sampler = SamplerState(bounds.max_num_seqs, model.config.vocab_size, device)
    runner = ModelRunner(model, ops, step_ops, kv_cache, tables, sampler)
    for chunks in steps:
        runner.submit(pack_chunks(chunks, block_size, num_blocks), _resets(len(chunks), DEAREST))()
    runner.close()
    return num_blocks * model.config.kv_bytes_per_block(block_size, model.logits_dtype)


def warm_up(runner: ModelRunner, bounds: Bounds, block_size: int, num_blocks: int) -> None:
    """Run a small step of each kind, so that no request waits for a kernel to be compiled.

    Kernels for few rows differ from those for many, so decodes come in several counts. What they
    leave in the pool belongs to no sequence, and rows are reset when they are handed out.
    """
    counts = sorted({min(n, bounds.max_num_seqs) for n in (*WARM_UP_DECODES, bounds.max_num_seqs)})
    chunk = min(TAIL_TOKENS, bounds.max_q_len)
    steps = [pack_chunks([(0, chunk)], block_size, num_blocks)]
    for n in counts:
        decodes = [(chunk - 1, 1)] * n
        steps.append(pack_chunks(decodes, block_size, num_blocks, num_decodes=n))
    for params in (GREEDY, DEAREST):
        for step in steps:
            runner.submit(step, _resets(step.num_seqs, params))()


def _resets(num_rows: int, params: SamplingParams) -> list[RowState]:
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
