"""The table of rotary angles, built once from the checkpoint's settings.

Frequencies and angles are computed in fp32 on the CPU by the very expressions checkpoints were
trained with. More precision would be less right: at position 100,000 one fp32 rounding of a
frequency already turns a pair by 0.005 rad, and a model has only ever seen the rounded angles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tvr.core.config import ModelConfig
from tvr.core.rope_scaling import RopeScaling


def build_cos_sin_cache(config: ModelConfig, max_position: int) -> Tensor:
    """Return the cos half then the sin half of each position's angles.

    Args:
        config: gives head_dim, the base and the scaling.
        max_position: positions 0 to max_position - 1 get a row.

    Returns:
        [max_position, head_dim] fp32, on the CPU.
    """
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]  # [max_position, head_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the angle per position of each channel pair (i, i + head_dim / 2).

    Returns:
        [head_dim / 2] fp32, radians per token, falling from 1.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "per_pair":
        return frequencies / (scaling.factor * torch.tensor(scaling.divisors, dtype=torch.float32))
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend linearly in between.

    The blend weight is linear in the number of turns a pair makes over the original context.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies  # tokens per turn
    turns = scaling.original_max_position_embeddings / wavelengths
    keep = (turns - low) / (high - low)
    blended = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    is_long = wavelengths > scaling.original_max_position_embeddings / low
    is_short = wavelengths < scaling.original_max_position_embeddings / high
    stretched = torch.where(is_long, frequencies / scaling.factor, blended)
    return torch.where(is_short, frequencies, stretched)
