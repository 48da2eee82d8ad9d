"""Op specs: the static facts an op is bound for.

A spec is frozen and hashable and holds nothing that changes from step to step. Head counts are
those of this rank. A field with a default is *neutral* at that default: a backend that has never
heard of the field may serve a spec in which it is neutral, and is passed over otherwise
(`tvr.contract.why_not`), so an older plugin is never run with a field it does not know.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from tvr.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")

#: The log-probability of whatever is less likely, of what is impossible too.
LOGPROB_FLOOR = -9999.0

#: Most that `TopLogprobsSpec.num_top` may be: a backend may keep so many of a row in registers.
MAX_NUM_TOP = 32


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """What every op's spec has.

    Attributes:
        op: name of the op; its bind hook is `tvr_bind_<op>`.
        dtype: activation dtype, one of `DTYPES`.
        batch_invariant: the result of a row must not depend, bit for bit, on its neighbours.
    """

    op: ClassVar[str]

    dtype: str
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.op}: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"{self.op}: {f.name} is {value}; it must be at least 1")
            if type(value) is float and not value > 0:
                raise ConfigError(f"{self.op}: {f.name} is {value}; it must be above 0")
        num_heads = getattr(self, "num_heads", None)
        num_kv_heads = getattr(self, "num_kv_heads", None)
        if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
            raise ConfigError(
                f"{self.op}: {num_heads} query heads cannot be shared out among {num_kv_heads} "
                "KV heads; num_heads must be a multiple of num_kv_heads"
            )
        block_size = getattr(self, "block_size", 1)
        if block_size & (block_size - 1):
            raise ConfigError(f"{self.op}: block_size {block_size} is not a power of two")
        # "The same as dtype", said aloud, is the neutral value: equal facts make equal specs.
        for name in ("kv_dtype", "out_dtype"):
            if getattr(self, name, None) == self.dtype:
                object.__setattr__(self, name, None)

    def parts(self) -> tuple[OpSpec, ...]:
        """Return the specs of the ops that a composite is made of, in calling order; else none."""
        return ()

    def non_neutral(self) -> dict[str, object]:
        """Return the fields that differ from their neutral value, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.default is not MISSING and getattr(self, f.name) != f.default
        }


@dataclass(frozen=True, kw_only=True)
class RmsNormSpec(OpSpec):
    """`out = x / sqrt(mean(x^2) + eps) * weight` over rows of `hidden_size`."""

    op: ClassVar[str] = "rms_norm"

    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class AddRmsNormSpec(RmsNormSpec):
    """`residual_out = x + residual`, rounded, then `rms_norm` of it."""

    op: ClassVar[str] = "add_rms_norm"

    def parts(self) -> tuple[OpSpec, ...]:
        return (_part(RmsNormSpec, self),)


@dataclass(frozen=True, kw_only=True)
class RopeSpec(OpSpec):
    """Rotate the halves of q and k by the angles of their positions.

    `rotary_dim` (None: `head_dim`) is the number of leading channels rotated, the rest pass.
    """

    op: ClassVar[str] = "rope"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rotary_dim = self.rotary_dim or self.head_dim
        if rotary_dim % 2 or rotary_dim > self.head_dim:
            raise ConfigError(
                f"{self.op}: rotary_dim {rotary_dim} must be even and at most head_dim "
                f"{self.head_dim}"
            )
        if rotary_dim == self.head_dim:
            object.__setattr__(self, "rotary_dim", None)


@dataclass(frozen=True, kw_only=True)
class KvWriteSpec(OpSpec):
    """Store new keys and values in their cache slots. `kv_dtype` None: same as `dtype`."""

    op: ClassVar[str] = "kv_write"

    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class RopeKvWriteSpec(RopeSpec):
    """`rope`, then `kv_write` of the rotated k and of v."""

    op: ClassVar[str] = "rope_kv_write"

    block_size: int
    kv_dtype: str | None = None

    def parts(self) -> tuple[OpSpec, ...]:
        return _part(RopeSpec, self), _part(KvWriteSpec, self)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(OpSpec):
    """What both attention ops have.

    Attributes:
        kv_dtype: dtype of the cache; None: same as `dtype`.
        window: attend to this many last tokens, the query's own counted; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; None: no cap.
        causal: bottom-right aligned causal mask.
        return_lse: `run` will be given an `lse` tensor to fill.
        max_splits: upper bound on the splits of one sequence's keys; None: the backend decides.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str | None = None
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    return_lse: bool = False
    max_splits: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class AttentionDecodeSpec(AttentionSpec):
    """One new token a sequence; `max_q_len` above 1 is for speculative decoding."""

    op: ClassVar[str] = "attention_decode"

    max_q_len: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionPrefillSpec(AttentionSpec):
    """A chunk of new tokens a sequence; `max_q_len` None: as long as the step's bounds allow."""

    op: ClassVar[str] = "attention_prefill"

    max_q_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class SiluMulSpec(OpSpec):
    """`out = silu(gate) * up`."""

    op: ClassVar[str] = "silu_mul"

    intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class LinearSpec(OpSpec):
    """`out = x @ weight.T (+ bias)` for at most `max_rows` rows of x; None: any number."""

    op: ClassVar[str] = "linear"

    in_features: int
    out_features: int
    out_dtype: str | None = None
    weight_format: str = "dense"
    bias: bool = False
    max_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class FusedLinearSpec(LinearSpec):
    """`linear`, with what stands before and behind it in a decoder layer in one with it.

    Attributes:
        rms_norm: x is normed first, rounded as `rms_norm` rounds.
        silu_mul: the product, rounded, is gate columns then up columns: out is `silu_mul` of it,
            and has `out_features // 2` columns.
        add: the product, rounded, is added to a residual, and the sum rounded.
    """

    op: ClassVar[str] = "fused_linear"

    rms_norm: bool = False
    silu_mul: bool = False
    add: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.silu_mul and self.add:
            raise ConfigError(
                f"{self.op}: silu_mul and add are both asked for; it does one of them"
            )
        if self.silu_mul and self.out_features % 2:
            raise ConfigError(
                f"{self.op}: out_features {self.out_features} is odd; with silu_mul half of them "
                "are the gate's"
            )
        if self.out_dtype is not None and (self.silu_mul or self.add):
            raise ConfigError(
                f"{self.op}: out_dtype {self.out_dtype} does not go with silu_mul or add, which "
                f"give {self.dtype}"
            )

    @property
    def out_columns(self) -> int:
        """Columns of out."""
        return self.out_features // 2 if self.silu_mul else self.out_features

    def parts(self) -> tuple[OpSpec, ...]:
        own: dict[str, Any] = {"dtype": self.dtype, "batch_invariant": self.batch_invariant}
        norm = RmsNormSpec(**own, hidden_size=self.in_features)
        silu_mul = SiluMulSpec(**own, intermediate_size=self.out_columns)
        return (
            *((norm,) if self.rms_norm else ()),
            _part(LinearSpec, self),
            *((silu_mul,) if self.silu_mul else ()),
        )


@dataclass(frozen=True, kw_only=True)
class ArgmaxSpec(OpSpec):
    """Id of the largest logit of each row; `dtype` is that of the logits."""

    op: ClassVar[str] = "argmax"

    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class PrepareStepSpec(OpSpec):
    """Arrays of a step of decodes from tables by row. All are integers: `dtype` is the model's."""

    op: ClassVar[str] = "prepare_step"

    block_size: int


@dataclass(frozen=True, kw_only=True)
class SampleSpec(OpSpec):
    """The next token of each row, drawn as its row of the tables asks; `dtype` is the logits'."""

    op: ClassVar[str] = "sample"

    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class TopLogprobsSpec(OpSpec):
    """Log-probabilities of a token of each row and of its likeliest; `dtype` is the logits'.

    `num_top` is how many of the likeliest a call asks for at most.
    """

    op: ClassVar[str] = "top_logprobs"

    vocab_size: int
    num_top: int

    def __post_init__(self) -> None:
        super().__post_init__()
        most = min(MAX_NUM_TOP, self.vocab_size)
        if self.num_top > most:
            raise ConfigError(
                f"{self.op}: num_top is {self.num_top}; of {self.vocab_size} tokens it may be "
                f"{most} at most"
            )


SPECS: dict[str, type[OpSpec]] = {
    cls.op: cls
    for cls in (
        RmsNormSpec,
        AddRmsNormSpec,
        RopeSpec,
        KvWriteSpec,
        RopeKvWriteSpec,
        AttentionDecodeSpec,
        AttentionPrefillSpec,
        SiluMulSpec,
        LinearSpec,
        FusedLinearSpec,
        ArgmaxSpec,
        PrepareStepSpec,
        SampleSpec,
        TopLogprobsSpec,
    )
}
OPS = tuple(SPECS)

#: Ops made of other ops: served whole, or composed by core from these, or as many of them as
#: `OpSpec.parts` of a spec has.
COMPOSITES: dict[str, tuple[str, ...]] = {
    "add_rms_norm": ("rms_norm",),
    "rope_kv_write": ("rope", "kv_write"),
    "fused_linear": ("rms_norm", "linear", "silu_mul"),
}


def _part(cls: type[OpSpec], whole: OpSpec) -> OpSpec:
    """Return the spec of a part whose every field is a field of the whole."""
    return cls(**{f.name: getattr(whole, f.name) for f in fields(cls)})
