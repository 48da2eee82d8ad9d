"""Greedy tokens equal transformers' over 64 steps, alone and as one ragged batch."""

from __future__ import annotations

import pytest
import torch

from support.checkpoints import SHAPES, build_model, save_checkpoint
from support.engines import engine, greedy, prompts_of, tokens_of

STEPS = 64
LENGTHS = [1, 15, 16, 33, 100]


def transformers_tokens(model, prompt: list[int]) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_equal_transformers(name, tmp_path):
    model = build_model(SHAPES[name])
    path = save_checkpoint(model, SHAPES[name], tmp_path)
    prompts = prompts_of(LENGTHS)
    expected = [transformers_tokens(model, prompt) for prompt in prompts]
    with engine(path) as llm:
        alone = [tokens_of(llm.generate(prompt, greedy(STEPS)))[0] for prompt in prompts]
    # Another engine, so that the batch finds no prefix in the cache.
    with engine(path, max_num_batched_tokens=48, max_num_seqs=8) as llm:
        batch = tokens_of(llm.generate(prompts, greedy(STEPS)))
    assert alone == expected
    assert batch == expected
