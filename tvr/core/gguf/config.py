"""A ModelConfig from a GGUF file's metadata.

A key that would change the computation is either understood or refused by name; so a key of the
model that is not known is refused too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tvr.core.checkpoint import DTYPE_NAMES
from tvr.core.config import ModelConfig
from tvr.core.config_fields import Fields
from tvr.core.gguf.file import GGUFFile
from tvr.core.gguf.library import dequantize
from tvr.core.rope_scaling import DEFAULT_THETA, RopeScaling
from tvr.errors import CheckpointError, ConfigError

ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"

# Keys under "llama." that are read here, and ones that say nothing about the computation.
_READ = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window"),
    *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *("rope.scaling.type", "rope.scaling.factor"),
}
_IDLE = {"tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
# Keys of what tvr lacks, each with the values that leave it out.
_OFF: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
}


def read_config(file: GGUFFile) -> ModelConfig:
    """Return the shape of the model in `file`.

    Raises:
        ConfigError: another architecture or kind of file, or a field that is missing,
            contradictory or not supported.
    """
    _refuse_other_kinds(file)
    metadata = file.metadata
    fields = Fields(
        {key.removeprefix(f"{ARCHITECTURE}."): value for key, value in metadata.items()},
        f"{file.path}: {ARCHITECTURE} metadata",
    )
    _refuse_unsupported(file, fields)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{file.path}: attention.head_count {num_heads} is not a multiple of "
            f"attention.head_count_kv {num_kv_heads}; every KV head must serve as many query heads"
        )
    head_dim = _head_dim(file, fields, hidden_size, num_heads)
    tokens = metadata.get("tokenizer.ggml.tokens")
    # The number of tokens counts: some writers state the vocabulary size of the base model.
    vocab_size = len(tokens) if isinstance(tokens, list) else fields.integer("vocab_size")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=fields.integer("context_length"),
        rope_theta=fields.positive("rope.freq_base", DEFAULT_THETA),
        rope_scaling=_rope_scaling(file, fields, head_dim),
        attention_bias=_has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output"),
        mlp_bias=_has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=_dtype(file),
        bos_token_id=next(iter(token_ids(file, "bos")), None),
        eos_token_ids=tuple(sorted(token_ids(file, "eos", "eot", "eom"))),
    )


def token_ids(file: GGUFFile, *names: str) -> set[int]:
    """Return the ids of the named special tokens ("bos", "eos", ...), those there are.

    Where a SentencePiece-like vocabulary names no BOS, EOS or unknown token, Llama's 1, 2 and 0
    count. Ids outside the vocabulary, with which some writers say "none", are left out.
    """
    metadata = file.metadata
    defaults = {"bos": 1, "eos": 2, "unknown": 0}
    if metadata.get("tokenizer.ggml.model") != "llama":
        defaults = {}
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else 0
    found = [metadata.get(f"tokenizer.ggml.{n}_token_id", defaults.get(n)) for n in names]
    return {i for i in found if type(i) is int and 0 <= i < vocab_size}


def _refuse_other_kinds(file: GGUFFile) -> None:
    metadata = file.metadata
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file.path} is a GGUF file of type {kind!r}; give one of type 'model'")
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(
            f"{file.path}: architecture {_brief(architecture)} is not supported in GGUF files; "
            f"supported: {ARCHITECTURE!r}"
        )
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(
            f"{file.path} is one of {parts} parts of a model; join them with "
            "`llama-gguf-split --merge`"
        )


def _refuse_unsupported(file: GGUFFile, fields: Fields) -> None:
    for key, value in file.metadata.items():
        prefix, _, name = key.partition(".")
        if prefix != ARCHITECTURE or name in _READ or name in _IDLE:
            continue
        if name not in _OFF or value not in _OFF[name]:
            raise ConfigError(f"{file.path}: {key} is {_brief(value)}, which is not supported")
    window = fields.get("attention.sliding_window")
    if window and (type(window) is not int or window < fields.integer("context_length")):
        raise ConfigError(
            f"{file.path}: attention.sliding_window {_brief(window)} is not supported below "
            f"context_length {fields.get('context_length')}; only full attention is"
        )


def _head_dim(file: GGUFFile, fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("attention.key_length") is None and hidden_size % num_heads:
        raise ConfigError(
            f"{file.path}: embedding_length {hidden_size} is not a multiple of "
            f"attention.head_count {num_heads} and there is no attention.key_length"
        )
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = fields.integer(key, head_dim)
        if found != head_dim:
            raise ConfigError(
                f"{file.path}: {key} {found} is not supported; it must be the key length {head_dim}"
            )
    if head_dim % 2:
        raise ConfigError(f"{file.path}: head_dim {head_dim} is odd; rotary halves need it even")
    return head_dim


def _rope_scaling(file: GGUFFile, fields: Fields, head_dim: int) -> RopeScaling | None:
    # A factor without a type is linear, and older writers had another key for it.
    kind = fields.get("rope.scaling.type") or "linear"
    if kind not in ("linear", "none"):
        raise ConfigError(
            f"{file.path}: rope.scaling.type {_brief(kind)} is not supported; supported: linear, "
            f"none, and divisors in a tensor {ROPE_FREQS}"
        )
    factor = 1.0
    if kind == "linear":
        factor = fields.positive("rope.scaling.factor", fields.positive("rope.scale_linear", 1.0))
    if ROPE_FREQS in file.tensors:
        return RopeScaling(kind="per_pair", factor=factor, divisors=_divisors(file, head_dim))
    return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """Return what `rope_freqs` divides the frequency of each channel pair by."""
    tensor = file.tensors[ROPE_FREQS]
    if tensor.shape != (head_dim // 2,) or tensor.format.name != "F32":
        raise CheckpointError(
            f"{file.path}: {ROPE_FREQS} has shape {list(tensor.shape)} in {tensor.format.name}; it "
            f"must be [{head_dim // 2}] in F32"
        )
    divisors: list[float] = dequantize(file.rows(ROPE_FREQS), tensor.format)[0].tolist()
    if not all(0 < d < float("inf") for d in divisors):
        raise CheckpointError(f"{file.path}: {ROPE_FREQS} holds numbers that are not above 0")
    return tuple(divisors)


def _has_bias(file: GGUFFile, *products: str) -> bool:
    return any(name.endswith(tuple(f".{p}.bias" for p in products)) for name in file.tensors)


def _dtype(file: GGUFFile) -> str:
    """Return the dtype that most numbers of the file have.

    That of quantised ones is bfloat16: its range is fp32's, which no model outgrows.
    """
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[DTYPE_NAMES.get(tensor.format.name, "bfloat16")] += tensor.num_bytes
    return max(sizes, key=sizes.__getitem__, default="float32")


def _brief(value: Any) -> str:  # noqa: ANN401
    """Return a value for a message; arrays can be as long as the file."""
    return f"an array of {len(value)}" if isinstance(value, list) else repr(value)
