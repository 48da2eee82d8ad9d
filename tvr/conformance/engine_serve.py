"""A real engine on a tiny model: scheduler, chunks, prefix cache and all."""

from __future__ import annotations

from collections.abc import Sequence

from tvr.conformance.engine_model import BOUNDS, TinyModel
from tvr.conformance.ledger import CheckFailed
from tvr.core.batch import DeviceTables
from tvr.core.engine import Engine
from tvr.core.engine_config import EngineConfig
from tvr.core.graph_capture import CudaCapture, obstacles
from tvr.core.kv_cache import KVCache
from tvr.core.loader import EngineParts
from tvr.core.memory import Limits
from tvr.core.outputs import CompletionOutput
from tvr.core.runner import ModelRunner
from tvr.core.sampler import SamplerState
from tvr.core.sampling_params import SamplingParams
from tvr.core.step_graphs import capture_steps

#: Several steps for the longest prompt, several prompts in a step.
_TOKENS_A_STEP = 24


def greedy_tokens(
    model: TinyModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return `num_tokens` greedy tokens for each prompt, from one engine that serves them all.

    Raises:
        CheckFailed: a request ended in another way.
    """
    engine = _engine(model)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), list(prompt), params)
        found: dict[str, CompletionOutput] = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0] for output in engine.step()}
    finally:
        engine.close()
    for name, answer in found.items():
        if answer.finish_reason != "length":
            raise CheckFailed(f"prompt {name} ended by {answer.finish_reason}: {answer.error}")
    return [found[str(i)].token_ids for i in range(len(prompts))]


def _engine(model: TinyModel) -> Engine:
    spec, device = model.spec, model.device
    num_rows, context = BOUNDS.max_num_seqs, BOUNDS.max_seq_len
    num_blocks = context // spec.block_size
    with model.on_device():
        pool = KVCache.allocate(model.config, num_blocks, spec.block_size, spec.dtype, device)
        tables = DeviceTables(
            num_rows=num_rows, max_model_len=context, block_size=spec.block_size, device=device
        )
        sampler = SamplerState(num_rows, spec.vocab_size, device)
        runner = ModelRunner(model.llama, model.ops, model.step_ops, pool, tables, sampler)
        config = EngineConfig(dtype=spec.dtype, device=str(device), block_size=spec.block_size)
        if device.type == "cuda" and not obstacles(config, model.ops):
            capture = CudaCapture(model.ops.stream)
            runner.graphs = capture_steps(
                model.llama, model.ops, model.step_ops, pool, tables, sampler, BOUNDS, capture
            )
    parts = EngineParts(
        model_config=model.config,
        tokenizer=None,
        eos_token_ids=frozenset(),
        ops=model.ops,
        runner=runner,
        limits=Limits(
            max_model_len=context,
            block_size=spec.block_size,
            num_blocks=num_blocks,
            block_bytes=model.config.kv_bytes_per_block(spec.block_size, spec.dtype),
            max_num_seqs=num_rows,
            max_num_batched_tokens=_TOKENS_A_STEP,
        ),
        device=model.facts,
        dtype=spec.dtype,
        load_seconds=0.0,
    )
    return Engine(config, parts)
