"""The largest steps an engine can be given: they show what it takes besides the KV pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tvr.contract import Bounds
from tvr.core.batch import DeviceTables, PackedStep
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.runner import ModelRunner, RowState
from tvr.core.sampler import SamplerState
from tvr.core.sampling_params import MAX_LOGPROBS, SamplingParams

#: What grows with the context grows with its keys: a short chunk at its end shows that, in a
#: fraction of the time of a long one.
TAIL_TOKENS = 64

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
    argmax: Callable[..., Tensor],
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
    runner = ModelRunner(model, ops, argmax, kv_cache, tables, sampler)
    for chunks in steps:
        resets = [
            RowState(row=i, params=DEAREST, seed=i, prompt_token_ids=[0], output_token_ids=[])
            for i in range(len(chunks))
        ]
        runner.submit(pack_chunks(chunks, block_size, num_blocks), resets)()
    runner.close()
    return num_blocks * model.config.kv_bytes_per_block(block_size, model.logits_dtype)


def pack_chunks(chunks: list[tuple[int, int]], block_size: int, num_blocks: int) -> PackedStep:
    """Return a step of prefill chunks (start, length) that each sample.

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
        np.zeros(sum(lengths)),  # token ids
        np.repeat(rows, counts),
        np.concatenate([np.arange(n) for n in counts]),
        np.arange(sum(counts)) % num_blocks,
    ]
    return PackedStep(
        data=np.concatenate(data).astype(np.int32),
        num_seqs=len(chunks),
        num_decodes=0,
        num_samples=len(chunks),
        num_prefill_tokens=int(sum(lengths)),
        seq_lens=ends.tolist(),
        q_lens=lengths.tolist(),
        sample_rows=rows.tolist(),
    )
