"""Philox against its published answers, and the noise made of it."""

from __future__ import annotations

import math

import pytest
import torch

from tvr.core import philox
from tvr.core.philox import gumbel_from_words, gumbel_noise, gumbel_noise_at, philox4x32

# From Random123's kat_vectors: counter, key, output of philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def plain_philox(counter, key):
    """Philox4x32-10 in Python's own integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert philox4x32(words(counter), words(key)) == words(expected)


def test_token_noise_has_the_documented_counter_and_key():
    """Word `id % 4` of counter (position, id // 4, 0, 0) under the seed's two halves."""
    seed, position, token = -(1 << 62) + 12345, 77, 4242
    key = (seed % 2**32, (seed >> 32) % 2**32)
    word = plain_philox((position, token // 4, 0, 0), key)[token % 4]
    expected = -math.log(-math.log((word + 0.5) / 2**32))
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 5000)
    assert noise[0, token] == torch.tensor(expected, dtype=torch.float32)


def test_every_word_gives_a_finite_variate():
    noise = gumbel_from_words(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert noise.isfinite().all()
    assert (noise[:-1] < noise[1:]).all()  # u rises with the word, also at its very ends
    assert noise.min() < -3.12
    assert noise.max() > 22.8


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 1023, 4096])
def test_noise_of_chosen_tokens_is_that_of_the_whole_row(vocab_size):
    seeds, positions = torch.tensor([1, -5, 2**62]), torch.tensor([0, 3, 2**31])
    whole = gumbel_noise(seeds, positions, vocab_size)
    ids = torch.randint(vocab_size, (3, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise_at(seeds, positions, ids), whole.gather(1, ids))


def test_a_row_does_not_depend_on_the_chunk_it_is_computed_in(monkeypatch):
    seeds, positions = torch.arange(9), torch.arange(9) * 3
    together = gumbel_noise(seeds, positions, 1001)
    monkeypatch.setitem(philox._CHUNK, "cpu", 1)
    assert torch.equal(gumbel_noise(seeds, positions, 1001), together)


def test_seed_position_and_token_each_change_the_noise():
    def draw(seed, position):
        return gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 1000)[0]

    base = draw(1, 1)
    for other in (draw(2, 1), draw(1, 2), draw(1 + (1 << 32), 1)):
        assert (base == other).float().mean() < 0.01
    assert len(base.unique()) > 990


def test_noise_has_the_gumbel_distribution():
    """Kolmogorov-Smirnov distance below the 0.1% point, 1.95 / sqrt(n)."""
    noise = gumbel_noise(torch.full((50,), 9), torch.arange(50), 4000).flatten().double()
    rank = torch.arange(1, len(noise) + 1) / len(noise)
    distance = (torch.exp(-torch.exp(-noise.sort().values)) - rank).abs().max()
    assert distance < 1.95 / math.sqrt(len(noise))
