"""`config.json` in every form is understood, or refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tvr.core.config import ModelConfig, RopeScaling
from tvr.errors import CheckpointError, ConfigError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def parse(**edits: Any) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **edits})


def refused(match: str, **edits: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(**edits)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key not in keys}


# --- heads


@pytest.mark.parametrize(("hidden", "head_dim"), [(2048, 64), (4096, 128)])
def test_head_dim_absent_or_null_is_hidden_size_over_heads(hidden, head_dim):
    assert parse(hidden_size=hidden).head_dim == head_dim
    assert parse(hidden_size=hidden, head_dim=None).head_dim == head_dim


def test_head_dim_given_need_not_fill_hidden_size():
    config = parse(hidden_size=100, head_dim=128)
    assert (config.head_dim, config.hidden_size) == (128, 100)


def test_hidden_size_that_heads_do_not_divide_needs_head_dim():
    refused("state head_dim", hidden_size=100)


def test_odd_head_dim_is_refused():
    refused("head_dim 63 is odd", head_dim=63)


def test_kv_heads_absent_or_null_are_as_many_as_heads():
    assert ModelConfig.from_dict(without("num_key_value_heads")).num_kv_heads == 32
    assert parse(num_key_value_heads=None).num_kv_heads == 32


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 3), (33, 2), (2, 4)])
def test_kv_heads_that_do_not_divide_heads_are_refused(heads, kv_heads):
    refused(
        f"{heads} is not a multiple of num_key_value_heads {kv_heads}",
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 8), (28, 4), (71, 1), (9, 3)])
def test_any_group_size_is_taken(heads, kv_heads):
    config = parse(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
    assert config.group_size == heads // kv_heads


# --- rotary settings


def test_rope_theta_absent_is_ten_thousand():
    assert parse().rope_theta == 10000.0
    assert parse(rope_scaling=None).rope_scaling is None


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {},
        {"type": "default"},
        {"rope_type": "default"},
        {"rope_type": "default", "type": "default"},
    ],
)
def test_null_and_default_scaling_are_no_scaling(settings):
    assert parse(rope_scaling=settings).rope_scaling is None
    assert parse(rope_parameters=settings).rope_scaling is None


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_linear_scaling_is_read_under_every_name(key, place):
    config = parse(**{place: {key: "linear", "factor": 2}})
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_under_every_name(key, place):
    config = parse(**{place: {key: "llama3", **LLAMA3}})
    assert config.rope_scaling == RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=1024,
    )


def test_new_form_holds_theta_inside():
    config = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert config.rope_theta == 500000.0
    assert parse(rope_parameters={"rope_theta": 1e6}).rope_theta == 1e6


def test_both_forms_may_agree():
    settings = {"rope_type": "linear", "factor": 2.0}
    config = parse(
        rope_theta=5e5,
        rope_scaling=settings,
        rope_parameters={**settings, "rope_theta": 5e5},
    )
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_two_places_that_contradict_each_other_are_refused():
    refused("rope_theta is given twice", rope_theta=1e4, rope_parameters={"rope_theta": 5e5})
    refused(
        "factor is given twice",
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"type": "linear", "factor": 4.0},
    )
    refused(
        "type 'linear' and rope_type 'llama3'",
        rope_scaling={"type": "linear", "rope_type": "llama3", **LLAMA3},
    )


@pytest.mark.parametrize("kind", ["foo", "yarn", "dynamic", "longrope"])
def test_unknown_kind_of_scaling_is_refused_by_name(kind):
    refused(f"rope_type '{kind}' is not supported", rope_scaling={"type": kind, "factor": 2.0})


@pytest.mark.parametrize("key", LLAMA3)
def test_llama3_scaling_without_a_key_is_refused_by_that_key(key):
    settings = {k: v for k, v in LLAMA3.items() if k != key}
    refused(f"{key} is missing", rope_scaling={"rope_type": "llama3", **settings})


def test_factor_without_a_kind_is_refused():
    refused("lack rope_type", rope_scaling={"factor": 2.0})


@pytest.mark.parametrize("factor", [0, -1.0, "8", True, float("inf")])
def test_factor_that_is_no_positive_number_is_refused(factor):
    refused("factor is", rope_scaling={"type": "linear", "factor": factor})


def test_llama3_bands_that_cross_are_refused():
    settings = {**LLAMA3, "high_freq_factor": 1.0}
    refused("must be above low_freq_factor", rope_scaling={"type": "llama3", **settings})


def test_partial_rotation_is_refused():
    refused("partial_rotary_factor 0.5", partial_rotary_factor=0.5)
    refused("partial_rotary_factor 0.5", rope_parameters={"partial_rotary_factor": 0.5})
    assert parse(partial_rotary_factor=1.0).head_dim == 64


def test_rotary_settings_per_layer_type_are_refused():
    refused("per layer type", rope_parameters={"full_attention": {"rope_type": "default"}})


# --- what is not supported, and what is harmless


@pytest.mark.parametrize(
    ("match", "edits"),
    [
        ("Qwen2ForCausalLM", {"architectures": ["Qwen2ForCausalLM"]}),
        ("gemma", {"architectures": None, "model_type": "gemma"}),
        ("architectures", {"architectures": ["LlamaForCausalLM", "Other"]}),
        ("architectures", {"architectures": "LlamaForCausalLM"}),
        ("hidden_act 'gelu'", {"hidden_act": "gelu"}),
        ("quantization_config", {"quantization_config": {"quant_method": "awq"}}),
        ("sliding_window 1024", {"sliding_window": 1024}),
        ("layer_types sliding_attention", {"layer_types": ["sliding_attention"]}),
        ("sliding_window 4095", {"sliding_window": 4095}),
        ("dtype 'float8_e4m3fn'", {"dtype": "float8_e4m3fn"}),
        ("layer_types is 5", {"layer_types": 5}),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(match, edits):
    refused(match, **edits)


def test_a_mistral_config_that_leaves_the_window_out_has_one():
    mistral = {"architectures": ["MistralForCausalLM"]}
    refused("sliding_window 4096", **mistral, max_position_embeddings=8192)
    assert parse(**mistral).max_position_embeddings == 4096


@pytest.mark.parametrize(
    "edits",
    [
        {"pretraining_tp": 2},
        {"hidden_act": None},
        {"hidden_act": "swish"},
        {"quantization_config": None},
        {"sliding_window": None},
        {"sliding_window": 4096},
        {"sliding_window": 16, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 3},
        {"architectures": None},
        {"attention_dropout": 0.1, "use_cache": True, "initializer_range": 0.02},
    ],
)
def test_what_changes_nothing_is_accepted(edits):
    assert parse(**edits) == parse()


def test_mistral_without_a_window_is_the_same_graph():
    config = parse(architectures=["MistralForCausalLM"], sliding_window=None)
    assert config.architecture == "MistralForCausalLM"
    assert config.hidden_size == BASE["hidden_size"]


# --- values


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_size_that_is_missing_or_no_whole_number_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        ModelConfig.from_dict(without(key))
    for bad in (0, -1, 2.5, "32", True, 2**31):
        refused(f"{key} is {bad!r}", **{key: bad})


def test_an_eps_past_every_float_is_refused():
    refused("rms_norm_eps", rms_norm_eps=10**400)
    refused("rope_theta", rope_theta=10**400)


def test_flags_must_be_booleans():
    assert parse(attention_bias=True, mlp_bias=None).attention_bias
    refused("attention_bias is 'true'", attention_bias="true")


def test_eps_and_bias_and_tie_are_read():
    config = parse(rms_norm_eps=1e-6, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert config.rms_norm_eps == 1e-6
    assert config.attention_bias
    assert config.mlp_bias
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("edits", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "auto", "dtype": None}, "float32"),
    ],
)
def test_dtype_is_read_under_both_names(edits, dtype):
    assert parse(**edits).dtype == dtype


@pytest.mark.parametrize(("given", "found"), [(1, 1), ([1, 2], 1), (-1, None), (10**6, None)])
def test_a_bos_id_outside_the_vocabulary_is_none(given, found):
    assert parse(bos_token_id=given).bos_token_id == found


def test_eos_ids_of_both_files_are_merged():
    config = ModelConfig.from_dict(
        {**BASE, "eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [7, 2, 5]}
    )
    assert config.eos_token_ids == (2, 5, 7)
    assert config.bos_token_id == 1
    assert parse(eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    assert parse(eos_token_id=None).eos_token_ids == ()
    assert parse(eos_token_id=-1).eos_token_ids == ()
    refused("eos_token_id is 'x'", eos_token_id="x")


# --- memory figures


def test_parameters_and_block_bytes_are_counted():
    config = parse(
        hidden_size=8,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=10,
        num_hidden_layers=1,
    )
    # embedding and head, final norm, q, k and v, o, gate, up and down, two norms
    assert config.num_parameters == 2 * 80 + 8 + 32 * 8 + 8 * 16 + 3 * 8 * 16 + 2 * 8
    # K and V x 16 tokens x 2 KV heads x 4 channels x 2 bytes
    assert config.kv_bytes_per_block(16, "bfloat16") == 2 * 16 * 2 * 4 * 2


# --- directories


def write(path: Path, name: str, data: Any) -> None:
    (path / name).write_text(json.dumps(data))


def write_tensor(path: Path, dtype: str) -> None:
    header = {"model.norm.weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


def test_from_dir_merges_the_generation_config(tmp_path):
    write(tmp_path, "config.json", {**BASE, "eos_token_id": 2})
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [9]})
    assert ModelConfig.from_dir(str(tmp_path)).eos_token_ids == (2, 9)


@pytest.mark.parametrize("edits", [{}, {"torch_dtype": None}, {"dtype": None}])
def test_dtype_that_no_field_states_is_that_of_the_tensors(tmp_path, edits):
    write(tmp_path, "config.json", {**BASE, **edits})
    assert ModelConfig.from_dir(tmp_path).dtype == "float32"
    write_tensor(tmp_path, "BF16")
    assert ModelConfig.from_dir(tmp_path).dtype == "bfloat16"


def test_a_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_dir(tmp_path / "nothing")
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(CheckpointError, match=r"model.gguf is a file"):
        ModelConfig.from_dir(file)
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ufffd", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_by_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config.json"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_downloaded_is_refused_as_such(tmp_path, name):
    """Taken for absent, a lost generation_config.json would cost a chat model its EOS ids."""
    write(tmp_path, "config.json", BASE)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("blobs/0123")
    with pytest.raises(CheckpointError, match=rf"{name} .*\(a link to blobs/0123"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer"):
        ModelConfig.from_dir(tmp_path)
