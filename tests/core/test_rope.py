"""The rotary table follows the checkpoint's scaling, bit for bit as transformers has it."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tvr.core.config import ModelConfig, RopeScaling
from tvr.core.rope import build_cos_sin_cache, rope_frequencies

LINEAR = RopeScaling(kind="linear", factor=2.5)
LLAMA3 = RopeScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def model_config(head_dim: int, theta: float, scaling: RopeScaling | None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=16,
        hidden_size=4 * head_dim,
        intermediate_size=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def transformers_table(config: ModelConfig, positions: torch.Tensor) -> torch.Tensor:
    rope = {}
    if (scaling := config.rope_scaling) is not None:
        rope["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    theirs = LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            max_position_embeddings=131072,
            **rope,
        )
    )
    cos, sin = theirs(torch.empty(1), positions[None])  # [1, n, head_dim] each, halves repeated
    half = config.head_dim // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("head_dim", [2, 24, 64, 72, 96, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3], ids=["none", "linear", "llama3"])
def test_table_equals_transformers_bit_for_bit_at_near_and_far_positions(head_dim, theta, scaling):
    config = model_config(head_dim, theta, scaling)
    table = build_cos_sin_cache(config, 131072)
    assert table.dtype == torch.float32
    assert table.shape == (131072, head_dim)
    positions = torch.cat((torch.arange(200), torch.arange(130_872, 131_072)))
    assert torch.equal(table[positions], transformers_table(config, positions))


def test_llama3_bands_keep_blend_and_divide():
    """Published case: theta 500,000, head_dim 128, factor 8, 8,192 original positions."""
    plain = rope_frequencies(128, 500000.0, None)
    scaled = rope_frequencies(128, 500000.0, LLAMA3)
    assert torch.equal(scaled[:29], plain[:29])
    assert ((scaled < plain) & (scaled > plain / 8))[29:35].all()
    assert torch.equal(scaled[35:], plain[35:] / 8)
    # Pair 35 turns once in 8,218.7 tokens, just beyond 8,192.
    assert 2 * math.pi / float(plain[35]) == pytest.approx(8218.7, abs=0.1)
    assert float(plain[35]) == pytest.approx(0.000764497, rel=1e-5)
    assert float(scaled[35]) == pytest.approx(0.0000955621, rel=1e-5)


def test_position_zero_is_not_rotated():
    table = build_cos_sin_cache(model_config(8, 10000.0, None), 1)
    assert table.tolist() == [[1.0] * 4 + [0.0] * 4]


def test_linear_scaling_divides_every_frequency():
    plain = rope_frequencies(16, 10000.0, None)
    scaled = rope_frequencies(16, 10000.0, RopeScaling(kind="linear", factor=4.0))
    assert torch.equal(scaled * 4, plain)
