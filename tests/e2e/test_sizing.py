"""How an engine is sized: KV blocks on CPU and CUDA, and the largest steps that show the need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.engines import engine, prompts_of, save_shape
from tvr import SamplingParams
from tvr.contract import Bounds
from tvr.core.config import ModelConfig
from tvr.core.engine_config import EngineConfig
from tvr.core.host_memory import GIB, available_cpu_bytes
from tvr.core.largest_steps import LargestSteps
from tvr.core.llama import LlamaForCausalLM
from tvr.core.loader import device_facts, load_backends
from tvr.core.memory import (
    CPU_POOL_BYTES,
    DeviceMemory,
    cpu_pool_bytes,
    cuda_budget,
    cuda_pool_bytes,
    size_pool,
    step_limits,
)
from tvr.core.profile import pack_chunks, warm_up
from tvr.core.step_ops import StepOps
from tvr.core.weights import dummy_weights
from tvr.errors import CapacityError

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
BLOCK_BYTES = SMALL.kv_bytes_per_block(16, "float32")
EMPTY = DeviceMemory(total=100 * GIB, free=99 * GIB, reserved=0, allocated=0)


@pytest.mark.parametrize(
    ("device", "gib", "tokens", "seqs"),
    [
        ("cpu", None, 2048, 32),
        ("cuda", None, 16384, 256),
        ("cuda", 80, 16384, 256),
        ("cuda", 24, 8192, 256),
    ],
)
def test_steps_are_smaller_where_memory_is(device, gib, tokens, seqs):
    device_bytes = None if gib is None else gib * GIB
    assert step_limits(EngineConfig(), device, device_bytes) == (seqs, tokens)
    asked = EngineConfig(max_num_seqs=3, max_num_batched_tokens=50)
    assert step_limits(asked, device, device_bytes) == (3, 50)


def pool_after(config, before, *, weights, peak, libraries=0, others=0, graphs=0):
    """Return the KV pool of an engine that takes so much beside it, in GiB."""
    after = DeviceMemory(
        total=before.total,
        free=before.free - (weights + libraries + others) * GIB,
        reserved=before.reserved + weights * GIB,
        allocated=before.allocated + weights * GIB,
    )
    peak_bytes = before.allocated + peak * GIB
    return cuda_pool_bytes(config, before, after, peak_bytes, graphs * GIB) / GIB


def test_the_pool_gets_what_weights_activations_libraries_and_graphs_leave_of_the_fraction():
    config = EngineConfig(memory_fraction=0.5)
    assert pool_after(config, EMPTY, weights=10, peak=14) == 50 - 14
    assert pool_after(config, EMPTY, weights=10, peak=14, libraries=1) == 50 - 14 - 1
    assert pool_after(config, EMPTY, weights=10, peak=14, libraries=1, graphs=2) == 50 - 14 - 3


def test_a_second_engine_gets_its_own_fraction():
    """Half the device each, in one process or in two: what the first has is not the second's."""
    config = EngineConfig(memory_fraction=0.4)
    same_process = replace(EMPTY, free=59 * GIB, reserved=40 * GIB, allocated=40 * GIB)
    other_process = replace(EMPTY, free=59 * GIB)
    for before in (EMPTY, same_process, other_process):
        assert pool_after(config, before, weights=10, peak=14) == 40 - 14


def test_no_engine_gets_more_than_is_free():
    config = EngineConfig(memory_fraction=0.9)
    crowded = replace(EMPTY, free=30 * GIB)
    assert cuda_budget(config, crowded) == 25 * GIB
    assert pool_after(config, crowded, weights=10, peak=14) == 25 - 14


def test_the_context_shrinks_to_the_pool_unless_it_was_asked_for():
    def size(config, num_blocks):
        return size_pool(
            config, SMALL, dtype="float32", pool_bytes=num_blocks * BLOCK_BYTES, contexts=4
        )

    assert size(EngineConfig(), 1000) == (64, 256)  # four contexts are enough
    assert size(EngineConfig(), 40) == (40, 256)
    assert size(EngineConfig(), 5) == (5, 80)
    assert size(EngineConfig(max_model_len=80), 5) == (5, 80)
    for config, num_blocks in (
        (EngineConfig(max_model_len=81), 5),
        (EngineConfig(), 0),
        (EngineConfig(), -3),
    ):
        with pytest.raises(CapacityError, match=r"a context of (81|256) tokens needs") as caught:
            size(config, num_blocks)
        assert "-" not in str(caught.value)


def test_a_cpu_pool_is_modest_but_holds_a_context_that_was_asked_for(monkeypatch):
    monkeypatch.setattr("tvr.core.memory.available_cpu_bytes", lambda: 20 * GIB)
    large = replace(SMALL, num_layers=32, num_kv_heads=32, num_heads=32, head_dim=128)
    assert cpu_pool_bytes(EngineConfig(), large, "float32") == CPU_POOL_BYTES
    asked = cpu_pool_bytes(EngineConfig(max_model_len=4096), large, "float32")
    assert asked == 4096 * large.kv_bytes_per_block(16, "float32") // 16
    fraction = EngineConfig(max_model_len=4096, memory_fraction=0.1)
    assert cpu_pool_bytes(fraction, large, "float32") == 2 * GIB


def test_a_cpu_pool_that_memory_cannot_hold_is_refused(monkeypatch):
    """The system grants it, since it takes memory as it fills, and then ends the process."""
    one = SMALL.kv_bytes_per_block(16, "float32")
    monkeypatch.setattr("tvr.core.memory.available_cpu_bytes", lambda: 100 * one)
    assert cpu_pool_bytes(EngineConfig(num_blocks=100), SMALL, "float32") > 0
    with pytest.raises(CapacityError, match="a KV cache of 101 blocks of 16 tokens takes"):
        cpu_pool_bytes(EngineConfig(num_blocks=101), SMALL, "float32")


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has it")
def test_cached_files_count_as_available_memory(monkeypatch):
    """They are let go of when memory is asked for; MemFree leaves them out."""
    text = "MemTotal: 32000000 kB\nMemFree: 100 kB\nMemAvailable: 16000000 kB\nCached: 1 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert available_cpu_bytes() == 16_000_000 * 1024
    for other in ("", "MemAvailable:\n", "MemAvailable: many kB\n"):
        monkeypatch.setattr(Path, "read_text", lambda self, other=other: other)
        assert available_cpu_bytes() > 1024 * 1024


@pytest.mark.parametrize(
    ("seqs", "tokens", "context", "block_size"),
    [(3, 16, 64, 16), (5, 17, 8, 4), (1, 1, 2, 16), (4, 200, 256, 1), (7, 7, 100, 64)],
)
def test_the_largest_steps_reach_every_bound(seqs, tokens, context, block_size, monkeypatch):
    bounds = Bounds(
        max_num_seqs=seqs,
        max_num_tokens=tokens,
        max_seq_len=context,
        max_q_len=min(tokens, context),
    )
    config = EngineConfig(device="cpu", block_size=block_size)
    device = torch.device("cpu")
    _, ops = load_backends(config, device_facts("cpu"), None)
    model = LlamaForCausalLM(
        SMALL,
        dummy_weights(SMALL, dtype="float32", device=device, seed=0),
        ops,
        block_size=block_size,
        max_position=context,
    )
    step_ops = StepOps.bind(
        ops, dtype="float32", block_size=block_size, vocab_size=SMALL.vocab_size
    )
    ops.allocate(bounds)
    steps = []
    forward = model.forward

    def watch(batch, kv_cache):
        steps.append(batch.step)
        assert batch.logit_rows.shape[0] == batch.step.num_seqs
        assert int(batch.slot_mapping.min()) >= 0
        assert int(batch.slot_mapping.max()) < kv_cache.layers[0][0].shape[0] * block_size
        return forward(batch, kv_cache)

    monkeypatch.setattr(model, "forward", watch)
    largest = LargestSteps(model, ops, step_ops, bounds, block_size, device)
    largest.run()
    largest.close()
    assert largest.pool_bytes % SMALL.kv_bytes_per_block(block_size, "float32") == 0
    assert max(s.num_seqs for s in steps) == seqs
    assert max(s.num_tokens for s in steps) == min(tokens, seqs * context)
    assert max(s.max_q_len for s in steps) == bounds.max_q_len
    assert max(s.max_seq_len for s in steps) == context


def test_packed_chunks_hand_out_blocks_in_turn():
    packed = pack_chunks([(0, 5), (6, 3)], block_size=4, num_blocks=4)
    rows, starts, lengths, samples = packed.data[:8].reshape(4, 2).tolist()
    assert (rows, starts, lengths, samples) == ([0, 1], [0, 6], [5, 3], [0, 1])
    table = packed.data[8 + 8 :].reshape(3, -1).tolist()
    assert table == [[0, 0, 1, 1, 1], [0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert (packed.seq_lens, packed.q_lens, packed.num_tokens) == ([5, 9], [5, 3], 8)


def test_the_engine_states_its_size(tmp_path):
    with engine(save_shape(tmp_path), num_blocks=20, max_num_seqs=3, device="cpu") as llm:
        stated = str(llm.limits)
    assert "20 blocks of 16 = 320 tokens" in stated
    assert "context 256, at most 3 sequences and 2048 tokens a step" in stated


def test_warming_up_runs_every_kind_of_step_and_leaves_nothing_behind(tmp_path):
    """Rows, pool and counts are as if it had not been; decodes come in few and in many."""
    prompts = prompts_of([5, 33])
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)
    path = save_shape(tmp_path)
    with engine(path, max_num_seqs=5) as llm:
        cold = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    with engine(path, max_num_seqs=5) as llm:
        runner, limits = llm.parts.runner, llm.parts.limits
        seen = []
        submit = runner.submit
        runner.submit = lambda packed, resets: (
            seen.append((packed.num_decodes, packed.num_prefill_tokens)) or submit(packed, resets)
        )
        bounds = Bounds(max_num_seqs=5, max_num_tokens=64, max_seq_len=256, max_q_len=40)
        warm_up(runner, bounds, limits.block_size, limits.num_blocks)
        del runner.submit
        assert seen == [(0, 40), (1, 0), (2, 0), (4, 0), (5, 0)] * 2
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == cold
