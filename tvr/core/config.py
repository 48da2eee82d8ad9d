"""What a model is, read from `config.json`. Standard library only.

A field that would change the computation is either understood or refused by name; it is never
skipped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvr.contract import DTYPES
from tvr.core.checkpoint import checkpoint_dtype, model_dir
from tvr.core.config_fields import Fields
from tvr.core.rope_scaling import RopeScaling, parse_rope
from tvr.core.text_files import is_there, read_json
from tvr.errors import ConfigError

__all__ = ["DTYPE_BYTES", "ModelConfig", "RopeScaling"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-like model.

    Attributes:
        architecture: "LlamaForCausalLM" or "MistralForCausalLM" (the same graph).
        vocab_size, hidden_size, intermediate_size, num_layers: sizes.
        num_heads, num_kv_heads, head_dim: query heads, KV heads, width of a head;
            `num_heads * head_dim` need not be `hidden_size`.
        rms_norm_eps: added to the mean square.
        max_position_embeddings: context length the checkpoint states, tokens.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; None: not at all.
        attention_bias: q, k, v and o projections have a bias.
        mlp_bias: gate, up and down projections have a bias.
        tie_word_embeddings: the LM head is the embedding.
        dtype: dtype of the checkpoint, one of `tvr.contract.DTYPES`.
        bos_token_id: None if the config names none.
        eos_token_ids: every id that ends a generation, sorted.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Weights and biases of the model; a tied embedding counts once."""
        q_size = self.num_heads * self.head_dim
        qkv_size = q_size + 2 * self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (qkv_size + q_size + 3 * self.intermediate_size + 2)
        if self.attention_bias:
            layer += qkv_size + self.hidden_size
        if self.mlp_bias:
            layer += 2 * self.intermediate_size + self.hidden_size
        embeddings = 1 if self.tie_word_embeddings else 2
        return (
            self.num_layers * layer
            + self.hidden_size
            + embeddings * self.vocab_size * self.hidden_size
        )

    def kv_bytes_per_block(self, block_size: int, dtype: str) -> int:
        """Return the bytes that a block of `block_size` tokens takes in all layers, K and V."""
        tokens = self.num_layers * 2 * block_size
        return tokens * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` and, for further EOS ids, `generation_config.json` in `path`.

        Where the config names no dtype, that of the checkpoint's tensors is taken.

        Raises:
            CheckpointError: no such directory, or a file that is missing or not JSON.
            ConfigError: a field that is missing, contradictory or not supported.
        """
        path = model_dir(path)
        data = read_json(path / "config.json")
        generation = path / "generation_config.json"
        if _dtype(data) is None:
            data = {**data, "dtype": checkpoint_dtype(path)}
        return cls.from_dict(data, read_json(generation) if is_there(generation) else {})

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Build a config from the contents of `config.json` and `generation_config.json`.

        Raises:
            ConfigError: a field that is missing, contradictory or not supported.
        """
        fields = Fields(data, "config.json")
        architecture = _architecture(data)
        hidden_size = fields.integer("hidden_size")
        num_heads = fields.integer("num_attention_heads")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}; every KV head must serve as many query heads"
            )
        max_position_embeddings = fields.integer("max_position_embeddings", 2048)
        rope_theta, rope_scaling = parse_rope(data)
        _refuse_unsupported(data, architecture, max_position_embeddings)
        vocab_size = fields.integer("vocab_size")
        bos_ids = fields.token_ids("bos_token_id")
        more = Fields(generation or {}, "generation_config.json")
        eos_ids = fields.token_ids("eos_token_id") + more.token_ids("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, hidden_size, num_heads),
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            max_position_embeddings=max_position_embeddings,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            dtype=_dtype(data) or "float32",
            bos_token_id=next(iter(_in_vocabulary(bos_ids, vocab_size)), None),
            eos_token_ids=tuple(sorted({*_in_vocabulary(eos_ids, vocab_size)})),
        )


def _architecture(data: Mapping[str, Any]) -> str:
    named = data.get("architectures") or [_MODEL_TYPES.get(str(data.get("model_type")))]
    allowed = list(_MODEL_TYPES.values())
    if not isinstance(named, list) or len(named) != 1 or named[0] not in allowed:
        raise ConfigError(
            f"config.json: architectures {data.get('architectures')} (model_type "
            f"{data.get('model_type')!r}) is not supported; supported: {', '.join(allowed)}"
        )
    return str(named[0])


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads} and there is no head_dim; state head_dim"
        )
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} is odd; rotary halves need it even")
    return head_dim


def _dtype(data: Mapping[str, Any]) -> str | None:
    """Return the dtype stated under the new name or the old one, or None."""
    for key in ("dtype", "torch_dtype"):
        value = data.get(key)
        if value is None or value == "auto":
            continue
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise ConfigError(
                f"config.json: {key} {value!r} is not supported; supported: {', '.join(DTYPES)}"
            )
        return name
    return None


def _in_vocabulary(ids: list[int], vocab_size: int) -> list[int]:
    # Some converters write -1 for "none"; an id outside the vocabulary can never be sampled.
    return [i for i in ids if 0 <= i < vocab_size]


def _refuse_unsupported(data: Mapping[str, Any], architecture: str, max_position: int) -> None:
    activation = data.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported, only 'silu'")
    if data.get("quantization_config") is not None:
        raise ConfigError(
            "config.json: quantization_config is not supported; give a checkpoint in "
            f"{', '.join(DTYPES)}"
        )
    # A Mistral config that leaves the window out means 4096, as in the first Mistral model.
    window = data.get("sliding_window", 4096 if architecture.startswith("Mistral") else None)
    windowed = window is not None and data.get("use_sliding_window") is not False
    if windowed and (not isinstance(window, int) or window < max_position):
        raise ConfigError(
            f"config.json: sliding_window {window} is not supported below "
            f"max_position_embeddings {max_position}; only full attention is"
        )
    layer_types = data.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"config.json: layer_types is {layer_types!r}; it must be a list or null")
    others = sorted({str(t) for t in layer_types} - {"full_attention"})
    if others:
        raise ConfigError(
            f"config.json: layer_types {', '.join(others)} not supported, only full_attention"
        )
