"""Random numbers by counter: each is a pure function of seed, output position and token id.

No generator state exists, so a batch's other rows, preemption, replay and the device cannot
change a draw. The layout is written down in docs/numerics.md, "Random numbers".
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Counter word 2 tells independent uses of the same seed and position apart.
TOKEN_STREAM = 0

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LANES = 4

# Counters computed at a time. The CPU's number keeps the intermediates (1 MB each) in cache;
# the GPU's only bounds memory, since there every op of a chunk is a launch.
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 23}


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit output words of Philox4x32-10.

    Args:
        counter: four broadcastable int64 tensors of values in [0, 2^32).
        key: two of the same.

    Returns:
        Four int64 tensors of values in [0, 2^32). Words stay as small as broadcasting allows
        until the rounds mix them.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so both halves are exact; the mask after the
        # arithmetic shift drops the copies of the sign bit.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) ^ c1 ^ k0) & _MASK, p1 & _MASK
        c2, c3 = ((p0 >> 32) ^ c3 ^ k1) & _MASK, p0 & _MASK
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """Return the 32-bit words of token blocks; word i of a block belongs to token 4 block + i.

    Args:
        seeds: [R, 1] int64, the 64-bit keys.
        positions: [R, 1] int64, output positions.
        blocks: [R or 1, B] int64, token id // 4.

    Returns:
        [R, B, 4] int64 in [0, 2^32).
    """
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seeds.device)
    counter = (positions & _MASK, blocks, zero + TOKEN_STREAM, zero)
    return torch.stack(philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK)), dim=-1)


def gumbel_from_words(words: Tensor) -> Tensor:
    """Return standard Gumbel variates -log(-log u) in fp32, u = (word + 1/2) / 2^32.

    u is exact in fp64 and inside (0, 1), so every variate is finite (-3.13 to 22.87). The
    logarithms are fp64 as well: rounded to fp32, their last-bit differences between devices and
    vector widths are gone, except about once in 2^28 variates.
    """
    u = words.double().add_(0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_().float()


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the noise of every token: [R, vocab] fp32, for seeds and positions [R] int64."""
    blocks = torch.arange(-(-vocab_size // _LANES), device=seeds.device)[None]  # [1, B]
    out = torch.empty((len(seeds), vocab_size), dtype=torch.float32, device=seeds.device)
    step = max(1, _CHUNK[seeds.device.type] // blocks.shape[1])
    for first in range(0, len(seeds), step):
        part = slice(first, first + step)
        words = random_words(seeds[part, None], positions[part, None], blocks)  # [r, B, 4]
        out[part] = gumbel_from_words(words).flatten(1)[:, :vocab_size]
    return out


def gumbel_noise_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise of chosen tokens: [R, K] fp32, for token_ids [R, K] int64.

    Equal, bit for bit, to `gumbel_noise(...)` gathered at `token_ids`, at the cost of K tokens.
    """
    words = random_words(seeds[:, None], positions[:, None], token_ids // _LANES)  # [R, K, 4]
    lane = (token_ids % _LANES)[..., None]
    return gumbel_from_words(words.gather(-1, lane).squeeze(-1))
