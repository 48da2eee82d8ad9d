"""A GGUF file gives the config and the weights of the directory it came from, or is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from support.checkpoints import SHAPES, build_model, save_checkpoint
from support.engines import save_shape
from support.gguf_files import decoded, write_gguf
from tvr.core.config import ModelConfig
from tvr.core.gguf import weights as gguf_weights
from tvr.core.gguf.checkpoint import GGUFCheckpoint
from tvr.core.parameters import Weights
from tvr.core.rope import build_cos_sin_cache
from tvr.core.weights import load_weights
from tvr.errors import CapacityError, CheckpointError, ConfigError

#: Formats whose blocks fit a hidden size of 64 and an intermediate size of 96.
QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a function from a shape's name to its Hugging Face directory."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = save_shape(tmp_path_factory.mktemp(name), name)
        return made[name]

    return get


@pytest.fixture
def refuse(tmp_path, directory):
    """Return a function that writes a file with changes, which must be refused by its name."""

    def check(kind: type[Exception], shape: str = "llama3_old_form", **changes) -> str:
        path = write_gguf(tmp_path / "model.gguf", directory(shape), **changes)
        with pytest.raises(kind) as e:
            GGUFCheckpoint(path)
        assert str(path) in str(e.value)
        assert "\n" not in str(e.value)
        return str(e.value)

    return check


def named(weights: Weights, config: ModelConfig) -> dict[str, torch.Tensor]:
    return dict(weights.slots(config))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shape", SHAPES)
def test_config_and_fp32_weights_equal_those_of_the_directory(tmp_path, directory, shape):
    source = directory(shape)
    expected = ModelConfig.from_dir(source)
    path = write_gguf(tmp_path / "x.gguf", source)
    checkpoint = GGUFCheckpoint(path)
    config = checkpoint.config
    # A file without a vocabulary names no special tokens, and all llama models are one kind in it.
    assert config == replace(
        expected,
        architecture="LlamaForCausalLM",
        bos_token_id=None,
        eos_token_ids=(),
        rope_scaling=config.rope_scaling,
    )
    table = build_cos_sin_cache(config, 256)
    # Divisors are rounded once more than the frequencies of llama3 are; the others are the same.
    tolerance = 256 * 2**-22 if "llama3" in shape else 0
    assert torch.allclose(table, build_cos_sin_cache(expected, 256), rtol=0, atol=tolerance)
    weights = checkpoint.load_weights(dtype="float32", device="cpu")
    theirs = load_weights(source, expected, dtype="float32", device="cpu")
    assert_equal(named(weights, config), named(theirs, expected))
    assert (weights.lm_head is weights.embedding) == config.tie_word_embeddings


@pytest.mark.parametrize("format", ["F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_half_precision_files_load_exactly(tmp_path, directory, format, dtype):
    source = directory("llama3_old_form")
    config = ModelConfig.from_dir(source)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "x.gguf", source, format=format))
    stored = {"F16": "float16", "BF16": "bfloat16"}[format]
    assert checkpoint.config.dtype == stored
    expected = load_weights(source, config, dtype="float32", device="cpu")
    rounded = {
        # The file keeps vectors in fp32.
        name: (t if t.dim() == 1 else t.to(getattr(torch, stored))).to(getattr(torch, dtype))
        for name, t in named(expected, config).items()
    }
    weights = checkpoint.load_weights(dtype=dtype, device="cpu")
    assert_equal(named(weights, checkpoint.config), rounded)


def test_the_dtype_is_that_of_most_numbers_not_of_most_tensors(tmp_path, directory):
    source = directory("wide_heads_both_biases")  # more vectors, in F32, than matrices
    path = write_gguf(tmp_path / "x.gguf", source, format="F16")
    assert GGUFCheckpoint(path).config.dtype == "float16"


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("shape", ["llama3_old_form", "group_2_tied_head_dim_null"])
def test_quantised_weights_are_what_the_gguf_package_makes_of_them(
    tmp_path, directory, format, shape
):
    source = directory(shape)
    config = ModelConfig.from_dir(source)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "x.gguf", source, format=format))
    assert checkpoint.config.dtype == "bfloat16"
    weights = named(checkpoint.load_weights(dtype="float32", device="cpu"), checkpoint.config)
    for name, tensor in named(
        load_weights(source, config, dtype="float32", device="cpu"), config
    ).items():
        # Rows are quantised one by one, so that their order does not matter.
        expected = tensor if tensor.dim() == 1 else decoded(tensor, format)
        assert torch.equal(weights[name], expected), name
        assert tensor.dim() == 1 or not torch.equal(expected, tensor)


@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_formats_of_large_blocks_are_dequantised(tmp_path, format):
    """The package cannot write them; blocks of random bytes with small scales stand in."""
    shape = replace(
        SHAPES["llama3_old_form"],
        config=SHAPES["llama3_old_form"].config | {"hidden_size": 256, "intermediate_size": 256},
    )
    source = save_checkpoint(build_model(shape), shape, tmp_path / "hf")
    path = write_gguf(tmp_path / "x.gguf", source)
    qtype = gguf.GGMLQuantizationType[format]
    _, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 60, (256, block_bytes), generator=generator, dtype=torch.uint8).numpy()
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name.endswith("ffn_up.weight"):
            writer.add_tensor(tensor.name, raw, raw_dtype=qtype)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GGUFCheckpoint(tmp_path / "q.gguf")
    weights = named(checkpoint.load_weights(dtype="float32", device="cpu"), checkpoint.config)
    expected = torch.from_numpy(gguf.dequantize(raw, qtype))
    assert expected.isfinite().all()
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], expected)


def test_large_tensors_are_dequantised_in_parts_and_progress_reaches_the_end(
    tmp_path, directory, monkeypatch
):
    source = directory("wide_heads_both_biases")
    path = write_gguf(tmp_path / "x.gguf", source)
    whole = GGUFCheckpoint(path).load_weights(dtype="float32", device="cpu")
    largest = 0

    def counting(rows, fmt):
        nonlocal largest
        largest = max(largest, rows.nbytes)
        return dequantize(rows, fmt)

    dequantize = gguf_weights.dequantize
    monkeypatch.setattr(gguf_weights, "dequantize", counting)
    monkeypatch.setattr(gguf_weights, "_CHUNK_LEN", 7 * 48)  # 7 of 131 rows, less than a head
    seen: list[tuple[int, int]] = []
    checkpoint = GGUFCheckpoint(path)
    parts = checkpoint.load_weights(
        dtype="float32", device="cpu", progress=lambda done, total: seen.append((done, total))
    )
    assert largest == 4 * 32 * 48  # one head of q
    assert_equal(named(parts, checkpoint.config), named(whole, checkpoint.config))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1]


def test_divisors_and_a_linear_factor_apply_together(tmp_path, directory):
    divisors = torch.tensor([1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0])
    path = write_gguf(
        tmp_path / "x.gguf",
        directory("linear_old_type_key"),
        tensors={"rope_freqs.weight": divisors},
    )
    table = build_cos_sin_cache(GGUFCheckpoint(path).config, 2)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    assert torch.equal(table[1, :8], (plain / (4.0 * divisors)).cos())


def test_scaling_keys_of_old_and_unscaled_files_are_understood(tmp_path, directory):
    def scaling(**values):
        metadata = {f"llama.rope.{k.replace('__', '.')}": v for k, v in values.items()}
        path = write_gguf(
            tmp_path / "x.gguf", directory("multi_head_bare_config"), metadata=metadata
        )
        return GGUFCheckpoint(path).config.rope_scaling

    assert scaling() is None
    assert scaling(scaling__type="none") is None
    assert scaling(scaling__type="none", scaling__factor=4.0) is None
    assert scaling(scaling__type="linear", scaling__factor=1.0) is None
    assert scaling(scale_linear=2.5).factor == 2.5
    assert scaling(scaling__factor=4.0).factor == 4.0
    assert scaling(scaling__factor=4.0, scaling__original_context_length=64).kind == "linear"


def test_optional_keys_have_llama_cpps_defaults(tmp_path, directory):
    optional = ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv")
    path = write_gguf(
        tmp_path / "x.gguf",
        directory("multi_head_bare_config"),
        metadata={f"llama.{key}": None for key in optional},
    )
    assert GGUFCheckpoint(path).config == replace(
        ModelConfig.from_dir(directory("multi_head_bare_config")),
        bos_token_id=None,
        eos_token_ids=(),
    )


def test_the_vocabulary_size_is_that_of_the_tokens_if_there_are_any(tmp_path, directory):
    tokens = [f"t{i}" for i in range(131)]
    metadata = {"tokenizer.ggml.tokens": tokens, "llama.vocab_size": 99}
    path = write_gguf(tmp_path / "x.gguf", directory("llama3_old_form"), metadata=metadata)
    assert GGUFCheckpoint(path).config.vocab_size == 131


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "llama4", "mamba"])
def test_other_architectures_are_refused_by_name(refuse, architecture):
    assert architecture in refuse(ConfigError, metadata={"general.architecture": architecture})


def test_other_kinds_of_files_are_refused_by_name(refuse):
    assert "'adapter'" in refuse(ConfigError, metadata={"general.type": "adapter"})
    assert "one of 3 parts" in refuse(ConfigError, metadata={"split.count": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.sliding_window", 64),
        ("attention.causal", False),
        ("attention.scale", 0.1),
        ("attention.value_length", 8),
        ("rope.dimension_count", 8),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.attn_factor", 1.2),
        ("logit_scale", 2.0),
        ("a_feature_of_tomorrow", 1),
        ("attention.head_count", [4, 4]),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 0),
        ("rope.freq_base", 0.0),
        ("rope.scaling.factor", math.inf),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("context_length", "256"),
        ("context_length", None),
        ("block_count", None),
        ("vocab_size", None),
    ],
)
def test_features_and_values_that_are_not_understood_are_refused_by_key(refuse, key, value):
    assert key in refuse(ConfigError, metadata={f"llama.{key}": value})


def test_switched_off_features_are_no_hindrance(tmp_path, directory):
    off = {
        "expert_count": 0,
        "expert_used_count": 0,
        "attention.sliding_window": 256,  # the whole context
        "attention.causal": True,
        "logit_scale": 1.0,
        "tensor_data_layout": "Meta AI original pth",
    }
    path = write_gguf(
        tmp_path / "x.gguf",
        directory("llama3_old_form"),
        metadata={f"llama.{key}": value for key, value in off.items()},
        tensors={"blk.0.attn_rot_embd.weight": torch.ones(8)},
    )
    GGUFCheckpoint(path).load_weights(dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight", "blk.0.attn_k.bias"],
)
def test_a_missing_tensor_is_refused_by_name(refuse, name):
    message = refuse(CheckpointError, "wide_heads_both_biases", tensors={name: None})
    assert f"lacks tensor {name}" in message


def test_without_an_output_matrix_the_embedding_is_it(tmp_path, directory):
    path = write_gguf(
        tmp_path / "x.gguf", directory("llama3_old_form"), tensors={"output.weight": None}
    )
    weights = GGUFCheckpoint(path).load_weights(dtype="float32", device="cpu")
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize(
    "name", ["blk.2.ffn_up.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_norm.bias", "x"]
)
def test_an_unknown_tensor_is_refused_by_name(refuse, name):
    assert name in refuse(CheckpointError, tensors={name: torch.ones(64)})


def test_a_misshapen_tensor_is_refused_with_both_shapes(refuse):
    changed = {"blk.1.attn_v.weight": torch.ones(64, 32)}
    message = refuse(CheckpointError, tensors=changed)
    assert "blk.1.attn_v.weight has shape [64, 32]; the metadata asks for [32, 64]" in message
    assert "rope_freqs" in refuse(CheckpointError, tensors={"rope_freqs.weight": torch.ones(3)})


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_impossible_divisors_are_refused(refuse, value):
    divisors = torch.ones(8).index_fill_(0, torch.tensor([3]), value)
    assert "rope_freqs.weight" in refuse(CheckpointError, tensors={"rope_freqs.weight": divisors})


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length"])
def test_absurd_sizes_are_refused_by_tensor_before_memory_is_taken(refuse, key):
    assert ".weight" in refuse(
        CheckpointError,
        metadata={
            f"llama.{key}": 2**31 - 1,
            "llama.attention.key_length": 16,
            "llama.attention.value_length": 16,
        },
    )


def test_integers_for_weights_are_refused_by_tensor(tmp_path, directory):
    path = write_gguf(tmp_path / "x.gguf", directory("llama3_old_form"))
    entry = b"blk.0.ffn_up.weight" + bytes([2, 0, 0, 0])
    data = bytearray(path.read_bytes())
    kind_at = data.index(entry) + len(entry) + 16
    data[kind_at] = gguf.GGMLQuantizationType.I32
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight is stored in I32"):
        GGUFCheckpoint(path)


def test_numbers_too_large_for_half_precision_are_refused_by_tensor(tmp_path, directory):
    changed = torch.full((64, 96), 1e5)
    path = write_gguf(
        tmp_path / "x.gguf",
        directory("llama3_old_form"),
        tensors={"blk.1.ffn_down.weight": changed},
    )
    checkpoint = GGUFCheckpoint(path)
    with pytest.raises(CheckpointError, match=r"x\.gguf: blk\.1\.ffn_down\.weight holds 100000"):
        checkpoint.load_weights(dtype="float16", device="cpu")
    checkpoint.load_weights(dtype="bfloat16", device="cpu")


def test_missing_memory_is_refused_with_the_size(tmp_path, directory, monkeypatch):
    path = write_gguf(tmp_path / "x.gguf", directory("llama3_old_form"))
    checkpoint = GGUFCheckpoint(path)

    def empty(*args, **kwargs):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(Weights, "empty", empty)
    with pytest.raises(CapacityError, match="GiB in float32"):
        checkpoint.load_weights(dtype="float32", device="cpu")
