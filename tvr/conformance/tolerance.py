"""Every tolerance of the conformance suite, each with its reason.

`eps` is the distance from 1 to the next number of a dtype; rounding once costs at most `eps / 2`
of the value, and about 0.2 `eps` in the root mean square.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

#: Smallest positive number: below the normal range the spacing stops shrinking.
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

#: Attention and linear, half precision: relative Frobenius error in units of eps. The rounding of
#: the result takes 0.2 and that of the softmax weights as much again; one token dropped of 8192
#: already shows above 0.5, where a limit on the largest error misses it.
FROBENIUS_EPS = 0.5

#: The same in fp32 (with TF32 off), where the order of summation matters more than the rounding:
#: this many eps up to `FP32_TERMS` terms, growing with the root of their number from there.
FP32_FROBENIUS_EPS = 32.0
FP32_TERMS = 64**2

#: Linear, besides: an error of this times the terms' absolute values, summed. Where they cancel the
#: result is small, but fp32 rounds while sums are large. It is a hundredth of what half precision
#: is allowed for 4,096 terms, and no more than fp32 is for 2,048.
LINEAR_SLACK = 2.0**-23

#: fused_linear: the error of its product, by the same measure, before it is rounded. Each element
#: is judged by itself, and the worst of thousands of fp32 sums of 72 random terms was off by 2^-23.
#: In half precision it lets 1 element of 400 be a number beside the right one, at 2,048 terms.
FUSED_SLACK = 2.0**-21

#: Linear whose sums fp32 holds exactly. A partial sum rounded to half precision costs a 64th or
#: more; the ulp is for fp32 that is put together from several narrower products.
LINEAR_EXACT_ULPS = 1.0

#: Largest single error: this often that of a plain low-precision computation of the same thing,
#: plus eps of the largest value. Catches one wrong element among many right ones.
MAX_ERROR_FACTOR = 2.0

#: Log-sum-exp: absolute part for exp and log in fp32, relative part for the rounding of the scores.
LSE_ABSOLUTE = 1e-4
SCORE_RELATIVE = 2.0**-20

#: Log-probabilities: fp32 differences and exponentials leave a sum off by a few 2^-24 of itself
#: times the distance from the best where most weight lies, which is no more than the logarithm of
#: the vocabulary. Then come a logarithm, where it is fp32 an ulp of 12, and the result's rounding.
LOGPROB_ABSOLUTE = 2.0**-18
LOGPROB_RELATIVE = 2.0**-22

#: exp turns the absolute error of a score into a relative one of its weight. A plain sum of 128
#: products in fp32 is off by a few times 2^-24 of the score. That reaches what the rounding of the
#: result is allowed only for scores above 8 in fp32, 1,024 in fp16 and 8,192 in bf16.
SCORE_IN_EXP = 2.0**-21

#: Norms in fp32: the sum of squares (halved by the root), rsqrt (2 ulps on a GPU), two products.
NORM_FP32_ULPS = 8.0

#: The same as a relative error of the normalised row. Half-precision norms are held against an
#: oracle that rounds where the contract rounds, at both ends of this error: since rounding and the
#: product with the weight keep order, a right result lies between the two. They differ only within
#: that error of a rounding boundary, for fewer than one element in 200, where one ulp before the
#: product with the weight can be two behind it. Another order of the casts moves tens of percent.
NORM_ARITHMETIC = NORM_FP32_ULPS * EPS["float32"]

#: RoPE: rounding once. The slack is fp32's error in the two products, which shows if they cancel.
ROPE_ULPS = 1.0
ROPE_SLACK = 2.0**-23

#: silu_mul: computed in fp32, rounded once; in fp32 itself exp and the division add a few ulps.
SILU_ULPS = 1.0
SILU_FP32_ULPS = 8.0
SILU_ZERO = 1e-30  # silu(-100) = -4e-42, which fp32 hardware may flush to zero

#: Uniform or one-sided softmax weights: exact up to the rounding of the result; in fp32 up to that
#: of the sums, where `FP32_FROBENIUS_EPS` holds. Of a thousand equal weights all are rounded to the
#: same side, as is much of their sum: a plain fp32 softmax may be off by more, and where it is, the
#: limit is `max_error_limit`.
NEEDLE_EPS = 1.0

#: Logits of a whole model in half precision: the root mean square of the error against fp64, as a
#: multiple of what the reference has in the same dtype. Of thousands of logits that is a steady
#: measure (right backends differ by a fifth at most), where the largest is one draw of a tail.
LOGITS_ERROR_FACTOR = 1.5

#: The same for the largest error over a text of some dozens of tokens, which `tvr bench` asks for
#: before it times a model: right backends had 0.9 to 1.15 times that of the reference.
LOGITS_MAX_ERROR_FACTOR = 1.5


def frobenius_limit(dtype: str, num_terms: int) -> float:
    """Return the largest relative Frobenius error of sums of `num_terms` products."""
    if dtype != "float32":
        return FROBENIUS_EPS * EPS[dtype]
    return FP32_FROBENIUS_EPS * EPS[dtype] * max(1.0, math.sqrt(num_terms / FP32_TERMS))


def attention_limit(dtype: str, kv_len: int, largest_score: float) -> float:
    """Return the largest relative Frobenius error of one sequence's attention."""
    return max(frobenius_limit(dtype, kv_len), SCORE_IN_EXP * largest_score)


def max_error_limit(
    dtype: str, low_precision_error: float, largest: float, largest_score: float = 0.0
) -> float:
    """Return the largest error of one element."""
    relative = max(EPS[dtype], SCORE_IN_EXP * largest_score)
    return MAX_ERROR_FACTOR * (low_precision_error + relative * largest)


def lse_limit(largest_score: float) -> float:
    """Return the largest error of a log-sum-exp."""
    return LSE_ABSOLUTE + SCORE_RELATIVE * largest_score


def logprob_limit(exact: Tensor) -> Tensor:
    """Return the largest error of each log-probability."""
    return LOGPROB_ABSOLUTE + LOGPROB_RELATIVE * exact.abs()


def needle_limit(dtype: str, kv_len: int) -> float:
    """Return the largest relative error where the softmax weights are known beforehand."""
    if dtype == "float32":
        return frobenius_limit(dtype, kv_len)
    return NEEDLE_EPS * EPS[dtype]


def logits_limit(dtype: str, reference_error: float, largest: float, num_ops: int) -> float:
    """Return the largest error of one logit of a model.

    In half precision that is measured by the largest error of the reference, as for one op. In
    fp32 each op of the chain may be off as `FP32_FROBENIUS_EPS` says, and independent errors add
    up as the root of their number.

    Args:
        dtype: of the model.
        reference_error: largest error of the reference in this dtype.
        largest: the largest logit.
        num_ops: ops that a logit comes through.
    """
    if dtype != "float32":
        return max_error_limit(dtype, reference_error, largest)
    return FP32_FROBENIUS_EPS * EPS[dtype] * math.sqrt(num_ops) * largest


def ulp(x: Tensor, dtype: str) -> Tensor:
    """Return the spacing of `dtype`'s numbers at each element of x (fp64)."""
    _, exponent = torch.frexp(x.abs())  # |x| = m * 2^exponent, m in [0.5, 1)
    spacing = torch.ldexp(torch.full_like(x, EPS[dtype] / 2), exponent)
    return spacing.clamp_min(SMALLEST[dtype])
