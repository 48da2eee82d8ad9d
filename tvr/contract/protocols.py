"""How each op is called: the signature of its `run`.

`out` and every other named output is allocated by the caller, filled, and returned; nothing else
is written. Inputs may be strided as long as their last dimension is contiguous. Shapes: T tokens,
S sequences, H query heads, KVH KV heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract.bound import StepMeta
    from tvr.contract.sampling_tables import SamplingTables


class RmsNorm(Protocol):
    """x, out [..., hidden]; weight [hidden]."""

    def __call__(self, x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor: ...


class AddRmsNorm(Protocol):
    """x, residual, out, residual_out [..., hidden]. residual_out may be residual itself."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        *,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class Rope(Protocol):
    """q, q_out [T, H, D]; k, k_out [T, KVH, D]; positions [T] int64; cache [max, rotary_dim] fp32.

    Rotates in fp32 and rounds once. Outputs may be the inputs.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class KvWrite(Protocol):
    """k, v [T, KVH, D]; caches [blocks, KVH, block_size, D]; slot_mapping [T] int64, -1: skip."""

    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None: ...


class RopeKvWrite(Protocol):
    """`Rope`, then `KvWrite` of the rotated k and of v."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class AttentionDecode(Protocol):
    """q, out [S, H, D]; lse [S, H] fp32, natural log. An empty row gives zeros and lse -inf."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor: ...


class AttentionPrefill(Protocol):
    """q, out [T, H, D]; k, v [T, KVH, D], which are in the cache already; lse [T, H] fp32."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor: ...


class SiluMul(Protocol):
    """x [T, 2 * I], gate columns then up columns; out [T, I]."""

    def __call__(self, x: Tensor, *, out: Tensor) -> Tensor: ...


class Linear(Protocol):
    """x [T, in]; out [T, out]; packed: what `pack` returned."""

    def __call__(self, x: Tensor, packed: Any, *, out: Tensor) -> Tensor: ...  # noqa: ANN401


class FusedLinear(Protocol):
    """`Linear`, of the norm of x, and with what comes behind it, as the spec says.

    x [T, in]; packed: what `pack` returned; out [T, out], or [T, out / 2] with `silu_mul`.
    norm_weight [in] and eps are given with `rms_norm`, residual [T, out] with `add`: out may be
    residual itself.
    """

    def __call__(
        self,
        x: Tensor,
        packed: Any,  # noqa: ANN401
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> Tensor: ...


class Argmax(Protocol):
    """logits [T, vocab]; out [T] int64: lowest id of the largest; -1 for a row with a NaN."""

    def __call__(self, logits: Tensor, *, out: Tensor) -> Tensor: ...


class PrepareStep(Protocol):
    """Each sequence of a step of decodes is a row of the tables: its arrays come from there.

    entries [S, 3] int32: the row, the position of the token to compute, and a block id that the
    row's table gets for that position, or -1; padding is (a spare row, -1, -1). block_table
    [rows, max_blocks] int32; last_token [rows] int64. Outputs: input_ids, positions, rows,
    slot_mapping [S] int64; seq_lens [S] int32; step_block_table [S, max_blocks] int32, filled as
    far as the sequence goes. Padding has length 0, slot -1, position 0.
    """

    def __call__(
        self,
        entries: Tensor,
        block_table: Tensor,
        last_token: Tensor,
        *,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        step_block_table: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...


class Sample(Protocol):
    """Choose the next token of each row of logits [R, vocab]; R is at most the bounds' sequences.

    rows [R] int64: which row of the tables a row of logits is. No two are the same, but for a
    spare row, which may be there any number of times. output_positions [R] int64: 0 for a
    request's first new token. out [R] int64: -1 where the largest logit, after penalties, is not
    finite. A token is also stored in last_token [rows] int64 (0 for -1) and, in a row with
    penalties, counted in `tables.counts`. docs/numerics.md says what is drawn.
    """

    def __call__(
        self,
        logits: Tensor,
        rows: Tensor,
        output_positions: Tensor,
        tables: SamplingTables,
        last_token: Tensor,
        *,
        out: Tensor,
    ) -> Tensor: ...


class TopLogprobs(Protocol):
    """Log-probabilities of rows of logits [R, vocab]; R is at most the bounds' sequences.

    tokens [R] int64: a token of each row; what is below 0, as in padding, counts as 0. ids [R, 1 +
    k] int64: this token, then the k likeliest, the likeliest first and of equals the lower id; k is
    any number from 0 to the spec's `num_top`. values [R, 1 + k] fp32: their log-softmax, at least
    `LOGPROB_FLOOR`. ranks [R] int64: that of the token among all by the same order, from 1. It is
    the order of logits: log-probabilities may be equal by rounding where logits are not. A row
    whose largest logit is not finite has NaN for values, and any ids of the vocabulary.
    """

    def __call__(
        self, logits: Tensor, tokens: Tensor, *, ids: Tensor, values: Tensor, ranks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


PROTOCOLS: dict[str, type] = {
    "rms_norm": RmsNorm,
    "add_rms_norm": AddRmsNorm,
    "rope": Rope,
    "kv_write": KvWrite,
    "rope_kv_write": RopeKvWrite,
    "attention_decode": AttentionDecode,
    "attention_prefill": AttentionPrefill,
    "silu_mul": SiluMul,
    "linear": Linear,
    "fused_linear": FusedLinear,
    "argmax": Argmax,
    "prepare_step": PrepareStep,
    "sample": Sample,
    "top_logprobs": TopLogprobs,
}
