"""Random numbers by counter, for `sample`. The layout is in docs/numerics.md, "Random numbers"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LOW_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORDS = 4  # of a call; each is a token's


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return a standard Gumbel variate of every token: [r, vocab] fp32.

    Args:
        seeds, positions: [r] int64, of the request and of the token in its output.
        vocab_size: tokens.

    Source: Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
    """
    block = torch.arange(-(-vocab_size // _WORDS), device=seeds.device)[None]  # [1, B]
    zero = torch.zeros_like(block)
    key = [seeds[:, None] & _LOW_32, (seeds[:, None] >> 32) & _LOW_32]
    a, b, c, d = positions[:, None] & _LOW_32, block, zero, zero
    for _ in range(_ROUNDS):
        # Products of int64 wrap: both halves of 64 bits are there.
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((right >> 32) ^ b ^ key[0]) & _LOW_32, ((left >> 32) ^ d ^ key[1]) & _LOW_32
        b, d = right & _LOW_32, left & _LOW_32
        key = [(k + step) & _LOW_32 for k, step in zip(key, _KEY_STEPS, strict=True)]
    words = torch.stack((a, b, c, d), dim=-1).flatten(1)[:, :vocab_size]
    u = (words.double() + 0.5) / 2**32  # exact, and inside (0, 1)
    return -(-u.log()).log().float()
