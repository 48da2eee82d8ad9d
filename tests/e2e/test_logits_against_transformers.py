"""fp32 logits equal transformers' on random checkpoints of every shape, and faults would show."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from support.batch import PagedRun
from support.checkpoints import PROMPT_LEN, SHAPES, build_model, random_prompt, save_checkpoint
from support.table import Wrap, WrappedTable
from tvr.core.config import ModelConfig
from tvr.core.llama import LlamaForCausalLM
from tvr.core.weights import Weights, load_weights

#: Largest difference of fp32 logits, in units of the largest logit.
LIMIT = 1e-5
#: A fault must move the logits at least this many limits on some checkpoint.
FAULT_FACTOR = 100
#: Error in half precision, in units of transformers' own in that dtype.
HALF_PRECISION_FACTOR = 1.5

MAX_POSITION = 256
FAR_POSITION = 100_000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as transformers has it and as read back from disk."""

    reference: transformers.PreTrainedModel
    config: ModelConfig
    weights: Weights

    def model(
        self,
        wraps: Mapping[str, Wrap] | None = None,
        max_position: int = MAX_POSITION,
        **edits: Any,
    ) -> LlamaForCausalLM:
        """Return our model, with ops wrapped and config fields edited to plant a fault."""
        return LlamaForCausalLM(
            replace(self.config, **edits),
            self.weights,
            WrappedTable(wraps),
            block_size=16,
            max_position=max_position,
        )

    def expected(self, ids: list[int], first_position: int = 0) -> Tensor:
        """Return transformers' logits [len(ids), vocab]."""
        positions = torch.arange(first_position, first_position + len(ids))
        with torch.inference_mode():
            return self.reference(torch.tensor([ids]), position_ids=positions[None]).logits[0]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Return a function from a shape's name to its checkpoint, made at the first call."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            reference = build_model(SHAPES[name])
            path = save_checkpoint(reference, SHAPES[name], tmp_path_factory.mktemp(name))
            config = ModelConfig.from_dir(path)
            weights = load_weights(path, config, dtype=config.dtype, device="cpu")
            made[name] = Checkpoint(reference, config, weights)
        return made[name]

    return get


@pytest.fixture(params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, load: Callable[[str], Checkpoint]) -> Checkpoint:
    return load(request.param)


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference in units of the largest expected logit."""
    assert found.isfinite().all()
    return float((found - expected).abs().max() / expected.abs().max())


def chunked(run: PagedRun, ids: list[int], sizes: list[int]) -> Tensor:
    """Prefill in chunks of `sizes`, decode the rest; return the logits of every token."""
    parts, start = [], 0
    for size in sizes:
        parts.append(run.step(prefill={0: ids[start : start + size]})[0])
        start += size
    parts += [run.step(decode={0: token})[0] for token in ids[start:]]
    return torch.cat(parts)


@pytest.mark.parametrize("length", [1, 15, 16, 17, PROMPT_LEN])
def test_a_prompt_in_one_chunk_gives_transformers_logits(checkpoint, length):
    ids = random_prompt(length, seed=length)
    found = PagedRun(checkpoint.model()).step(prefill={0: ids})[0]
    assert distance(found, checkpoint.expected(ids)) <= LIMIT


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_chunked_prefill_and_decodes_give_transformers_logits(checkpoint, block_size):
    ids = random_prompt(PROMPT_LEN, seed=2)
    run = PagedRun(checkpoint.model(), block_size=block_size, num_blocks=128)
    found = chunked(run, ids, [33, 16, 1, 7, 25])
    assert distance(found, checkpoint.expected(ids)) <= LIMIT


def test_a_ragged_batch_of_decodes_and_chunks_gives_transformers_logits(checkpoint):
    lengths = [PROMPT_LEN, 1, 17, 40, 64, 3, 16, 33, 90, 5, 70]
    ids = {i: random_prompt(length, seed=100 + i) for i, length in enumerate(lengths)}
    run = PagedRun(checkpoint.model())
    found: dict[int, list[Tensor]] = {i: [] for i in ids}
    computed = dict.fromkeys(ids, 0)
    # Sequence i joins at step i, prefills in chunks of its own size until 12 tokens are left,
    # then decodes: steps mix one to eleven sequences of every kind.
    for step in range(len(lengths) + PROMPT_LEN):
        decode: dict[int, int] = {}
        prefill: dict[int, list[int]] = {}
        for i in ids:
            left = len(ids[i]) - computed[i]
            if step < i or left == 0:
                continue
            if computed[i] and left <= 12:
                decode[i] = ids[i][computed[i]]
            else:
                prefill[i] = ids[i][computed[i] :][: 9 + 7 * (i % 4)]
        if not decode and not prefill:
            break
        for i, logits in run.step(decode=decode, prefill=prefill).items():
            found[i].append(logits)
            computed[i] += len(logits)
    for i in ids:
        assert distance(torch.cat(found[i]), checkpoint.expected(ids[i])) <= LIMIT


def test_far_positions_give_transformers_logits(checkpoint):
    ids = random_prompt(40, seed=3)
    model = checkpoint.model(max_position=FAR_POSITION + 40)
    found = chunked(PagedRun(model, first_position=FAR_POSITION), ids, [20])
    assert distance(found, checkpoint.expected(ids, FAR_POSITION)) <= LIMIT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_transformers(checkpoint, dtype):
    ids = random_prompt(PROMPT_LEN, seed=4)
    torch_dtype = getattr(torch, dtype)
    half = copy.deepcopy(checkpoint.reference).to(torch_dtype)
    exact = copy.deepcopy(half).float()  # of the rounded weights
    # `to` rounds the rotary frequencies too, which no model loaded in half precision does.
    for model in (half, exact):
        model.model.rotary_emb = checkpoint.reference.model.rotary_emb
    with torch.inference_mode():
        truth = exact(torch.tensor([ids])).logits[0]
        theirs = half(torch.tensor([ids])).logits[0].float()
    rounded = Weights.empty(checkpoint.config, dtype, "cpu")
    slots = dict(rounded.slots(checkpoint.config))
    for name, tensor in checkpoint.weights.slots(checkpoint.config):
        slots[name].copy_(tensor)
    model = replace(checkpoint, weights=rounded).model()
    ours = chunked(PagedRun(model), ids, [64, 16]).float()
    assert model.logits_dtype == dtype
    error, limit = (ours - truth).norm(), HALF_PRECISION_FACTOR * (theirs - truth).norm()
    assert error <= limit


# --- planted faults: each returns faulty logits, or None where a checkpoint cannot have the fault


def faulty(model: LlamaForCausalLM) -> Tensor:
    return chunked(PagedRun(model), FAULT_PROMPT, [50, 20])


FAULT_PROMPT = random_prompt(PROMPT_LEN, seed=5)


def no_rope_scaling(checkpoint: Checkpoint) -> Tensor | None:
    if checkpoint.config.rope_scaling is None:
        return None
    return faulty(checkpoint.model(rope_scaling=None))


def rope_scaling_in_prefill_only(checkpoint: Checkpoint) -> Tensor | None:
    if checkpoint.config.rope_scaling is None:
        return None
    run = PagedRun(checkpoint.model())
    prefill = run.step(prefill={0: FAULT_PROMPT[:70]})[0]
    run.model = checkpoint.model(rope_scaling=None)
    return torch.cat([prefill] + [run.step(decode={0: t})[0] for t in FAULT_PROMPT[70:]])


def default_theta(checkpoint: Checkpoint) -> Tensor | None:
    if checkpoint.config.rope_theta == 10000.0:
        return None
    return faulty(checkpoint.model(rope_theta=10000.0))


def default_eps(checkpoint: Checkpoint) -> Tensor:
    return faulty(checkpoint.model(rms_norm_eps=1e-6))


def interleaved_pairs(checkpoint: Checkpoint) -> Tensor:
    def wrap(run, spec):
        # The right op rotates (i, i + half): bring the pairs (2i, 2i + 1) there. q and k keep the
        # new order, which their product does not notice.
        order = torch.arange(spec.head_dim).view(-1, 2).t().flatten()

        def interleaved(q, k, *rest, q_out, k_out):
            return run(q[..., order], k[..., order], *rest, q_out=q_out, k_out=k_out)

        return interleaved

    return faulty(checkpoint.model({"rope_kv_write": wrap}))


def swapped_kv_heads(checkpoint: Checkpoint) -> Tensor | None:
    if checkpoint.config.num_kv_heads == 1:
        return None

    def wrap_decode(run, spec):
        return lambda q, k_cache, v_cache, step, **kw: run(
            q, k_cache.flip(1), v_cache.flip(1), step, **kw
        )

    def wrap_prefill(run, spec):
        return lambda q, k, v, k_cache, v_cache, step, **kw: run(
            q, k.flip(1), v.flip(1), k_cache.flip(1), v_cache.flip(1), step, **kw
        )

    wraps = {"attention_decode": wrap_decode, "attention_prefill": wrap_prefill}
    return faulty(checkpoint.model(wraps))


def top_left_mask(checkpoint: Checkpoint) -> Tensor:
    def wrap(run, spec):
        def top_left(q, k, v, k_cache, v_cache, step, **kw):
            # Row i sees keys 0 to i: what a sequence without its earlier chunks would see.
            q_lens = step.cu_seqlens_q.diff()
            step = replace(step, seq_lens=q_lens, seq_lens_cpu=q_lens.tolist())
            return run(q, k, v, k_cache, v_cache, step, **kw)

        return top_left

    return faulty(checkpoint.model({"attention_prefill": wrap}))


def dropped_bias(projection: str) -> Callable[[Checkpoint], Tensor | None]:
    def fault(checkpoint: Checkpoint) -> Tensor | None:
        weights = copy.deepcopy(checkpoint.weights)
        slots = weights.slots(checkpoint.config)
        biases = [slot for name, slot in slots if name.endswith(f"{projection}_proj.bias")]
        for bias in biases:
            bias.zero_()
        return faulty(replace(checkpoint, weights=weights).model()) if biases else None

    return fault


FAULTS: dict[str, Callable[[Checkpoint], Tensor | None]] = {
    "no_rope_scaling": no_rope_scaling,
    "rope_scaling_in_prefill_only": rope_scaling_in_prefill_only,
    "default_theta": default_theta,
    "default_eps": default_eps,
    "interleaved_pairs": interleaved_pairs,
    "swapped_kv_heads": swapped_kv_heads,
    "top_left_mask": top_left_mask,
} | {f"dropped_{p}_bias": dropped_bias(p) for p in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_moves_the_logits_far_beyond_the_limit(load, fault):
    moved = {}
    for name in SHAPES:
        checkpoint = load(name)
        logits = FAULTS[fault](checkpoint)
        if logits is not None:
            moved[name] = distance(logits, checkpoint.expected(FAULT_PROMPT))
    assert max(moved.values()) >= FAULT_FACTOR * LIMIT, moved


def test_original_context_is_at_most_a_third_of_the_prompt():
    """Otherwise a rotary scaling that is not applied would hardly show."""
    originals = [
        shape.rope["original_max_position_embeddings"]
        for shape in SHAPES.values()
        if shape.rope and shape.rope["rope_type"] == "llama3"
    ]
    assert originals
    assert max(originals) * 3 <= PROMPT_LEN
