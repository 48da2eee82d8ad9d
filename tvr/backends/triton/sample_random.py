"""Random numbers of `sample`: those of Philox4x32-10, by seed, position and token."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def words_of_blocks(seed, position, block):
    """Return four uint32 words of each counter (position, block, 0, 0).

    The products are of 64 bits, whose halves a GPU has by one instruction. `tl.philox` asks for
    each half by itself.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    # Rounds are counted in what is the same for all tokens, so that keys cost nothing a token.
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = block.to(tl.uint32)
    c0 = tl.zeros_like(c1) + position.to(tl.uint32)
    c2 = tl.zeros_like(c1)
    c3 = tl.zeros_like(c1)
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key_0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key_1
        c1 = (b & 0xFFFFFFFF).to(tl.uint32)
        c3 = (a & 0xFFFFFFFF).to(tl.uint32)
        key_0 = ((key_0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        key_1 = ((key_1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words_of_tile(seed, position, first, BLOCK: tl.constexpr):
    """Return the random uint32 words of tokens first, ..., first + BLOCK - 1; 4 divides both."""
    w0, w1, w2, w3 = words_of_blocks(seed, position, first // 4 + tl.arange(0, BLOCK // 4))
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of_ids(seed, position, ids):
    """Return the random uint32 words of some token ids."""
    w0, w1, w2, w3 = words_of_blocks(seed, position, ids >> 2)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def waiting_times(words):
    """Return -log(u), fp64, of random words: the time after which a token of weight 1 arrives."""
    return -tl.log((words.to(tl.float64) + 0.5) * _UNIT)


@triton.jit
def gumbel_noise(words):
    """Return the standard Gumbel variates of random words: fp64 inside, rounded to fp32."""
    return (-tl.log(waiting_times(words))).to(tl.float32)
