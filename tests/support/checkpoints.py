"""Random Hugging Face checkpoints, made so that faults show.

Weights are larger than any real initialisation, norms are not one, biases not zero, and
`original_max_position_embeddings` is at most a third of `PROMPT_LEN`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

PROMPT_LEN = 100
VOCAB_SIZE = 131


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a checkpoint is and how its config.json is written.

    Attributes:
        config: sizes and flags, as the transformers config takes them.
        rope: the rotary settings under their `rope_type` name, without theta.
        theta: rotary base.
        json_form: "old" writes rope_theta and rope_scaling, "old_type" calls the kind `type`,
            "new" writes rope_parameters, "bare" neither (base 10000, no scaling).
        drop, null: keys left out of config.json, and keys set to null in it.
        num_shards: files the weights are spread over.
        keep_lm_head: also store the LM head of a tied model.
        embedding_std: of the embedding; small where tied, or each token would predict itself.
        architecture: "Llama" or "Mistral".
    """

    config: dict[str, Any]
    rope: dict[str, Any] | None = None
    theta: float = 10000.0
    json_form: str = "old"
    drop: tuple[str, ...] = ()
    null: tuple[str, ...] = ()
    num_shards: int = 1
    keep_lm_head: bool = False
    embedding_std: float = 0.5
    architecture: str = "Llama"


def _sizes(hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        **more,
    }


def _llama3(factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


SHAPES: dict[str, Shape] = {
    "multi_head_bare_config": Shape(
        config=_sizes(64, 4, 4),
        json_form="bare",
        drop=("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    ),
    "group_2_tied_head_dim_null": Shape(
        config=_sizes(64, 4, 2, tie_word_embeddings=True),
        theta=500000.0,
        null=("head_dim", "rope_scaling"),
        embedding_std=0.1,
    ),
    "group_3_of_nine_heads": Shape(config=_sizes(72, 9, 3), json_form="new", drop=("head_dim",)),
    "group_7_attention_bias": Shape(config=_sizes(112, 14, 2, head_dim=8, attention_bias=True)),
    "multi_query_mlp_bias": Shape(
        config=_sizes(80, 5, 1, mlp_bias=True, num_hidden_layers=3), theta=100.0
    ),
    "wide_heads_both_biases": Shape(
        config=_sizes(48, 4, 2, head_dim=32, attention_bias=True, mlp_bias=True)
    ),
    "narrow_heads_large_eps": Shape(
        config=_sizes(96, 4, 4, head_dim=12, rms_norm_eps=1e-3), embedding_std=0.1
    ),
    "default_rope_sharded_tied_with_head": Shape(
        config=_sizes(64, 8, 2, tie_word_embeddings=True),
        rope={"rope_type": "default"},
        theta=1e6,
        num_shards=3,
        keep_lm_head=True,
        embedding_std=0.1,
    ),
    "linear_old_type_key": Shape(
        config=_sizes(64, 4, 2), rope={"rope_type": "linear", "factor": 4.0}, json_form="old_type"
    ),
    "linear_new_form": Shape(
        config=_sizes(64, 4, 1, head_dim=24),
        rope={"rope_type": "linear", "factor": 2.5},
        theta=50000.0,
        json_form="new",
    ),
    "llama3_old_form": Shape(
        config=_sizes(64, 4, 2), rope=_llama3(8.0, 32), theta=500000.0, num_shards=2
    ),
    "llama3_new_form_tied": Shape(
        config=_sizes(96, 6, 2, head_dim=64, tie_word_embeddings=True, num_hidden_layers=3),
        rope=_llama3(32.0, 24),
        theta=500000.0,
        json_form="new",
        embedding_std=0.1,
    ),
    "llama3_wide_all_biases": Shape(
        config=_sizes(48, 6, 3, head_dim=16, attention_bias=True, mlp_bias=True),
        rope=_llama3(4.0, 33),
    ),
    "mistral_without_window": Shape(
        config=_sizes(64, 8, 2, head_dim=16, sliding_window=None),
        architecture="Mistral",
        theta=1e6,
    ),
}


def random_prompt(length: int, seed: int) -> list[int]:
    """Return `length` token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def build_model(shape: Shape, seed: int = 0) -> transformers.PreTrainedModel:
    """Return transformers' model of that shape in fp32, with seeded random weights."""
    rope = {"rope_scaling": shape.rope} if shape.rope else {}
    config_class = getattr(transformers, f"{shape.architecture}Config")
    config = config_class(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=256,
        rope_theta=shape.theta,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
        **rope,
        **shape.config,
    )
    model_class = getattr(transformers, f"{shape.architecture}ForCausalLM")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(shape.embedding_std * noise)
            else:
                parameter.copy_(max(0.1, 1.2 * parameter.shape[1] ** -0.5) * noise)
    return model


def save_checkpoint(model: transformers.PreTrainedModel, shape: Shape, path: Path) -> Path:
    """Write `model` to `path`, its config.json in the form that `shape` asks for."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=-(-total // shape.num_shards) + 4096)
    if shape.keep_lm_head:
        _add_tensor(path, "lm_head.weight", model.lm_head.weight.detach() + 1.0)
    file = path / "config.json"
    data = json.loads(file.read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "dtype"):
        data.pop(key, None)
    data["torch_dtype"] = None
    if shape.json_form == "new":
        data["rope_parameters"] = {
            "rope_type": "default",
            **(shape.rope or {}),
            "rope_theta": shape.theta,
        }
    elif shape.json_form != "bare":
        data["rope_theta"] = shape.theta
        data["rope_scaling"] = dict(shape.rope) if shape.rope else None
        if shape.json_form == "old_type":
            data["rope_scaling"]["type"] = data["rope_scaling"].pop("rope_type")
    data |= {key: None for key in shape.null}
    file.write_text(json.dumps({k: v for k, v in data.items() if k not in shape.drop}))
    return path


def _add_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Store one more tensor in a sharded checkpoint, in a file of its own."""
    save_file({name: tensor.contiguous()}, path / "extra.safetensors")
    index = path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][name] = "extra.safetensors"
    index.write_text(json.dumps(data))
