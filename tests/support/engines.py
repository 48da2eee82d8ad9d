"""Engines on small random checkpoints, and ways to disturb them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from support.checkpoints import SHAPES, VOCAB_SIZE, build_model, save_checkpoint
from support.small_tokenizers import save_llama3
from tvr import LLM, RequestOutput, SamplingParams
from tvr.core.runner import ModelRunner

#: Covers much in one: llama3 scaling, grouped heads, two shards.
DEFAULT_SHAPE = "llama3_old_form"


def save_shape(path: Path, shape: str = DEFAULT_SHAPE) -> Path:
    """Write the random checkpoint of a named shape; it has no tokenizer."""
    return save_checkpoint(build_model(SHAPES[shape]), SHAPES[shape], path)


def save_text_model(path: Path, **sizes: int) -> Path:
    """Write a small random model with a Llama 3 style tokenizer and chat template."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            **sizes,
        }
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return save_llama3(path)


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[LLM]:
    """Yield an engine on `path`, closed at the end."""
    llm = LLM(path, **{"num_blocks": 128, "max_model_len": 256, **settings})
    try:
        yield llm
    finally:
        llm.close()


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Return random token ids of those lengths, clear of the special ids 0 and 1."""
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in lengths]


def greedy(max_tokens: int = 16, **more: Any) -> SamplingParams:
    """Return greedy parameters that run to `max_tokens`."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Return the token ids of each request's first answer."""
    return [output.outputs[0].token_ids for output in outputs]


def drain(llm: LLM) -> dict[str, RequestOutput]:
    """Step to the end; return every output object seen, by id."""
    seen: dict[str, RequestOutput] = {}
    while llm.has_unfinished_requests():
        seen.update({o.request_id: o for o in llm.step()})
    return seen


def all_blocks_came_back(llm: LLM) -> bool:
    """Whether nothing is used or held any more."""
    counts = llm._scheduler.block_manager.counts()
    return counts.used == counts.held == 0


@contextmanager
def delays(monkeypatch: Any, seed: int = 0) -> Iterator[None]:
    """Make the device slow now and the host slow then, so that their order varies."""
    rng = random.Random(seed)
    run, collect = ModelRunner._run, LLM._collect

    def slow_run(self: ModelRunner, *args: Any) -> Any:
        time.sleep(rng.choice([0, 0, 0.002]))
        return run(self, *args)

    def slow_collect(self: LLM) -> Any:
        time.sleep(rng.choice([0, 0, 0.002]))
        return collect(self)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_run", slow_run)
        patch.setattr(LLM, "_collect", slow_collect)
        yield
