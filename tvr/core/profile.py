"""The start-up profile: how much memory the largest steps take besides weights and KV pool."""

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
from tvr.core.sampling_params import SamplingParams


def prefill_step(lengths: list[int], block_size: int) -> PackedStep:
    """Return a step that reads prompts of `lengths` from position 0 and samples after each.

    Sequence i takes row i; blocks are handed out from 0. All token ids are 0.
    """
    num_blocks = [-(-n // block_size) for n in lengths]
    first_block = np.cumsum([0, *num_blocks])
    rows = np.arange(len(lengths))
    data = [
        rows,
        np.zeros(len(lengths)),  # starts
        np.array(lengths),
        rows,  # every entry samples
        np.zeros(sum(lengths)),  # token ids
        np.repeat(rows, num_blocks),
        np.concatenate([np.arange(n) for n in num_blocks]),
        np.arange(first_block[-1]),
    ]
    return PackedStep(
        data=np.concatenate(data).astype(np.int32),
        num_seqs=len(lengths),
        num_decodes=0,
        num_samples=len(lengths),
        num_prefill_tokens=sum(lengths),
        seq_lens=list(lengths),
        q_lens=list(lengths),
        sample_rows=rows.tolist(),
    )


def profile_peak_bytes(
    model: LlamaForCausalLM,
    ops: OpTable,
    argmax: Callable[..., Tensor],
    bounds: Bounds,
    block_size: int,
    device: torch.device,
) -> int:
    """Return the most bytes torch held on `device` while the largest steps ran.

    Two extremes are run: one prompt of `max_q_len` tokens, and `max_num_seqs` short ones that
    fill the step, with a logit row and the dearest sampling each. A pool just large enough for
    them stands in for the real one and is subtracted.
    """
    longest = [bounds.max_q_len]
    share = max(1, bounds.max_num_tokens // bounds.max_num_seqs)
    many = [min(share, bounds.max_seq_len)] * bounds.max_num_seqs
    steps = [prefill_step(lengths, block_size) for lengths in (longest, many)]
    num_blocks = max(sum(-(-n // block_size) for n in s.q_lens) for s in steps)
    kv_cache = KVCache.allocate(
        model.config, num_blocks, block_size, dtype=model.logits_dtype, device=device
    )
    pool_bytes = num_blocks * model.config.kv_bytes_per_block(block_size, model.logits_dtype)
    tables = DeviceTables(
        num_rows=bounds.max_num_seqs,
        max_model_len=bounds.max_seq_len,
        block_size=block_size,
        device=device,
    )
    sampler = SamplerState(bounds.max_num_seqs, model.config.vocab_size, device)
    runner = ModelRunner(model, ops, argmax, kv_cache, tables, sampler)
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5)
    torch.cuda.reset_peak_memory_stats(device)
    for step in steps:
        resets = [
            RowState(row=i, params=params, seed=i, prompt_token_ids=[0], output_token_ids=[])
            for i in range(step.num_seqs)
        ]
        runner.submit(step, resets)()
    return torch.cuda.max_memory_allocated(device) - pool_bytes
