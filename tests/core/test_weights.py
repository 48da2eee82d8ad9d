"""A checkpoint loads whole, into the right places, or is refused by file and tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tvr.core import weights as weights_module
from tvr.core.config import ModelConfig
from tvr.core.weights import Weights, dummy_weights, load_weights
from tvr.errors import CapacityError, CheckpointError

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=6,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
BIASED = replace(CONFIG, attention_bias=True, mlp_bias=True)
TIED = replace(CONFIG, tie_word_embeddings=True)
INDEX = "model.safetensors.index.json"


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a tensor for every name the config asks for."""
    generator = torch.Generator().manual_seed(0)
    slots = Weights.empty(config, "float32", "meta").slots(config)
    return {name: torch.randn(s.shape, generator=generator).to(dtype) for name, s in slots}


def save(path: Path, tensors: dict[str, Tensor], *, shards: int = 1) -> Path:
    """Write a checkpoint of one file, or of several with their index."""
    path.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        save_file(part, path / f"shard-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"shard-{i}.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def load(path: Path, config: ModelConfig = CONFIG, dtype: str = "float32") -> Weights:
    return load_weights(path, config, dtype=dtype, device="cpu")


def refused(path: Path, match: str, config: ModelConfig = CONFIG, dtype: str = "float32") -> None:
    with pytest.raises(CheckpointError, match=match):
        load(path, config, dtype)


# --- what goes where


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [CONFIG, BIASED, TIED], ids=["plain", "biased", "tied"])
def test_every_tensor_lands_in_its_rows_of_the_fused_products(tmp_path, config, shards):
    tensors = random_tensors(config)
    weights = load(save(tmp_path / "m", tensors, shards=shards), config)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, tensors["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."

        def stacked(*names: str, kind: str = "weight", prefix: str = prefix) -> Tensor:
            return torch.cat([tensors[f"{prefix}{name}_proj.{kind}"] for name in names])

        qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
        gate_up = ("mlp.gate", "mlp.up")
        assert torch.equal(layer.qkv.weight, stacked(*qkv))
        assert torch.equal(layer.gate_up.weight, stacked(*gate_up))
        assert torch.equal(layer.o.weight, stacked("self_attn.o"))
        assert torch.equal(layer.down.weight, stacked("mlp.down"))
        assert torch.equal(layer.input_norm, tensors[f"{prefix}input_layernorm.weight"])
        if config is BIASED:
            assert torch.equal(layer.qkv.bias, stacked(*qkv, kind="bias"))
            assert torch.equal(layer.gate_up.bias, stacked(*gate_up, kind="bias"))
            assert torch.equal(layer.o.bias, stacked("self_attn.o", kind="bias"))
            assert torch.equal(layer.down.bias, stacked("mlp.down", kind="bias"))
        else:
            assert layer.qkv.bias is None
            assert layer.down.bias is None


def test_a_tied_head_is_the_embedding_even_if_the_file_has_one(tmp_path):
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = torch.zeros(11, 8)
    weights = load(save(tmp_path / "m", tensors), TIED)
    assert weights.lm_head is weights.embedding
    assert torch.equal(weights.lm_head, tensors["model.embed_tokens.weight"])


def test_a_tied_model_stored_under_the_heads_name_loads(tmp_path):
    tensors = random_tensors(TIED)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    weights = load(save(tmp_path / "m", tensors), TIED)
    assert torch.equal(weights.embedding, tensors["lm_head.weight"])


def test_an_untied_head_is_its_own(tmp_path):
    tensors = random_tensors(CONFIG)
    weights = load(save(tmp_path / "m", tensors))
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"])
    assert not torch.equal(weights.lm_head, weights.embedding)


def test_an_untied_model_without_head_is_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["lm_head.weight"]
    refused(save(tmp_path / "m", tensors), r"lacks lm_head.weight .*tie_word_embeddings")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_dtype_is_cast_to_the_one_asked_for(tmp_path, stored, dtype):
    tensors = random_tensors(CONFIG, stored)
    weights = load(save(tmp_path / "m", tensors), dtype=dtype)
    expected = tensors["model.embed_tokens.weight"].to(getattr(torch, dtype))
    assert torch.equal(weights.embedding, expected)


def test_progress_reaches_the_total(tmp_path):
    calls: list[tuple[int, int]] = []
    path = save(tmp_path / "m", random_tensors(CONFIG), shards=2)
    load_weights(
        path,
        CONFIG,
        dtype="float32",
        device="cpu",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (CONFIG.num_parameters * 4,) * 2


# --- which files


def test_only_the_files_that_the_index_names_are_read(tmp_path):
    tensors = random_tensors(CONFIG)
    path = save(tmp_path / "m", tensors, shards=2)
    other = torch.full((11, 8), 7.0)
    save_file({"model.embed_tokens.weight": other}, path / "consolidated.safetensors")
    (path / "model.safetensors").write_bytes(b"not even a safetensors file")
    assert torch.equal(load(path).embedding, tensors["model.embed_tokens.weight"])


def test_a_stale_index_is_refused_with_every_missing_file(tmp_path):
    path = save(tmp_path / "m", random_tensors(CONFIG), shards=3)
    (path / "shard-0.safetensors").unlink()
    (path / "shard-2.safetensors").unlink()
    save_file(random_tensors(CONFIG), path / "model.safetensors")
    refused(path, r"not there: shard-0.safetensors, shard-2.safetensors")


def test_an_index_of_another_checkpoint_is_refused(tmp_path):
    path = save(tmp_path / "m", random_tensors(CONFIG), shards=2)
    data = json.loads((path / INDEX).read_text())
    data["weight_map"]["model.extra"] = "shard-0.safetensors"
    (path / INDEX).write_text(json.dumps(data))
    refused(path, r"shard-0.safetensors holds model.extra")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_a_damaged_index_is_refused_by_name(tmp_path, text):
    path = save(tmp_path / "m", random_tensors(CONFIG))
    (path / INDEX).write_text(text)
    refused(path, INDEX)


def test_a_single_file_of_another_name_is_read(tmp_path):
    path = save(tmp_path / "m", random_tensors(CONFIG))
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert load(path).embedding.shape == (11, 8)


def test_several_files_without_index_are_refused(tmp_path):
    path = save(tmp_path / "m", random_tensors(CONFIG), shards=2)
    (path / INDEX).unlink()
    refused(path, r"2 safetensors files .* add the index")


def test_no_safetensors_file_is_refused_and_others_are_named(tmp_path):
    refused(tmp_path, r"has no \*.safetensors file$")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, r"pytorch_model.bin must be converted")


def test_links_into_a_cache_are_followed(tmp_path):
    blobs = save(tmp_path / "blobs", random_tensors(CONFIG))
    (blobs / "model.safetensors").rename(blobs / "0123abcd")
    snapshot = tmp_path / "snapshots" / "f00"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    assert load(snapshot).embedding.shape == (11, 8)
    (blobs / "0123abcd").unlink()
    refused(snapshot, r"model.safetensors cannot be opened .*blobs/0123abcd, which does not exist")


def test_a_dangling_shard_or_index_is_refused_by_its_target(tmp_path):
    path = save(tmp_path / "m", random_tensors(CONFIG), shards=2)
    (path / "shard-1.safetensors").unlink()
    (path / "shard-1.safetensors").symlink_to("gone")
    refused(path, r"not there: shard-1.safetensors \(a link to gone")
    (path / INDEX).unlink()
    (path / INDEX).symlink_to("lost")
    refused(path, rf"{INDEX} cannot be opened \(a link to lost")


# --- damaged files


def test_a_git_lfs_pointer_is_refused_as_such(tmp_path):
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    )
    refused(tmp_path, r"model.safetensors is a Git LFS pointer")


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path, size):
    path = save(tmp_path / "m", random_tensors(CONFIG), shards=2)
    file = path / "shard-1.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(path, r"shard-1.safetensors is truncated")


def test_a_longer_file_than_its_header_says_is_refused(tmp_path):
    path = save(tmp_path / "m", random_tensors(CONFIG))
    with (path / "model.safetensors").open("ab") as f:
        f.write(b"more")
    refused(path, r"model.safetensors is truncated or damaged")


def entry(**fields: object) -> bytes:
    whole = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **fields}
    return json.dumps({"a": whole}).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b"\xff",
        b"[" * 100_000,
        entry(shape=[float("inf")]),
        entry(shape=["1"]),
        entry(shape=[-1]),
        entry(shape=1),
        entry(data_offsets=[0, 2.5]),
        entry(data_offsets=[4, 0]),
        entry(data_offsets=[0]),
        entry(data_offsets="ab"),
    ],
    ids=lambda header: header[:60].decode(errors="replace"),
)
def test_a_damaged_header_is_refused_by_file(tmp_path, header):
    data = len(header).to_bytes(8, "little") + header
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(tmp_path, r"model.safetensors")


# --- wrong tensors


def test_missing_tensors_are_named(tmp_path):
    tensors = random_tensors(CONFIG)
    for name in [n for n in tensors if n.startswith("model.layers.1.")]:
        del tensors[name]
    refused(save(tmp_path / "m", tensors), r"lacks model.layers.1.input_layernorm.weight.* more")


def test_a_misshapen_tensor_is_refused_with_both_shapes(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(4, 8)
    refused(
        save(tmp_path / "m", tensors),
        r"model.safetensors: model.layers.1.self_attn.k_proj.weight has shape \[4, 8\].*\[8, 8\]",
    )


def test_a_transposed_tensor_of_equal_size_is_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].t().contiguous()
    refused(save(tmp_path / "m", tensors), r"down_proj.weight has shape \[6, 8\]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_supported_is_refused_by_tensor(tmp_path, dtype):
    tensors = random_tensors(CONFIG)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.zeros(6, 8).to(dtype)
    refused(save(tmp_path / "m", tensors), r"up_proj.weight has dtype")


def test_derived_tables_are_ignored(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(2)
    assert load(save(tmp_path / "m", tensors)).embedding.shape == (11, 8)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.99.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
        "vision_tower.weight",
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(tmp_path, name):
    tensors = random_tensors(CONFIG)
    tensors[name] = torch.zeros(6, 8)
    refused(save(tmp_path / "m", tensors), f"model.safetensors holds {name}")


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_biases_and_their_flag_must_agree(tmp_path, part):
    flag = "attention_bias" if "attn" in part else "mlp_bias"
    name = f"model.layers.1.{part}.bias"
    tensors = random_tensors(BIASED)
    only_one = {n: t for n, t in tensors.items() if n.endswith("weight") or n == name}
    refused(
        save(tmp_path / "a", only_one),
        rf"holds {name}.*config.json would need {flag} true",
    )
    del tensors[name]
    refused(
        save(tmp_path / "b", tensors), rf"lacks {name} although config.json has {flag} true", BIASED
    )


@pytest.mark.parametrize("value", [1e5, -1e5])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_weight_that_float16_cannot_hold_is_refused_by_tensor(tmp_path, value, stored):
    tensors = random_tensors(CONFIG, stored)
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 2] = value
    path = save(tmp_path / "m", tensors)
    refused(path, r"model.layers.1.self_attn.v_proj.weight holds", dtype="float16")
    assert load(path, dtype="bfloat16").embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.pop("model.norm.weight"),
        lambda t: t.update({"model.norm.weight": torch.zeros(9)}),
        lambda t: t.update({"model.more.weight": torch.zeros(9)}),
    ],
    ids=["missing", "misshapen", "unknown"],
)
def test_headers_are_checked_before_memory_is_taken(tmp_path, monkeypatch, spoil):
    tensors = random_tensors(CONFIG)
    spoil(tensors)
    path = save(tmp_path / "m", tensors)
    real = Weights.empty

    def only_meta(config: ModelConfig, dtype: str, device: object) -> Weights:
        assert device == "meta", "memory was taken before the checkpoint was checked"
        return real(config, dtype, "meta")

    monkeypatch.setattr(weights_module.Weights, "empty", only_meta)
    refused(path, "model")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in other units")
def test_loading_holds_little_beside_the_weights(tmp_path):
    """Pages of a mapping count as memory: mapping a whole file to its end held the model twice."""
    config = replace(CONFIG, vocab_size=64, hidden_size=1024, intermediate_size=4096, num_layers=8)
    header, end = {}, 0
    for name, slot in Weights.empty(config, "float32", "meta").slots(config):
        offsets = [end, end := end + 4 * slot.numel()]
        header[name] = {"dtype": "F32", "shape": list(slot.shape), "data_offsets": offsets}
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + end)  # a hole, read as zeros
    code = f"""
import resource
from tvr.core.config import ModelConfig
from tvr.core.weights import load_weights
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
weights = load_weights({str(tmp_path)!r}, {config!r}, dtype="float32", device="cpu")
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert end > 400e6
    assert int(done.stdout) < 1.25 * end


def test_weights_that_do_not_fit_are_refused_with_their_size():
    config = replace(CONFIG, vocab_size=2**40, hidden_size=2**10, num_layers=1)
    with pytest.raises(CapacityError, match=r"weights take .* GiB in bfloat16, which cpu"):
        dummy_weights(config, dtype="bfloat16", device="cpu", seed=0)


# --- seeded weights


def flat(weights: Weights, config: ModelConfig) -> Tensor:
    return torch.cat([slot.float().flatten() for _, slot in weights.slots(config)])


@pytest.mark.parametrize("config", [BIASED, TIED], ids=["biased", "tied"])
def test_dummy_weights_follow_the_seed(config):
    first, again, other = (
        flat(dummy_weights(config, dtype="float32", device="cpu", seed=s), config)
        for s in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dummy_weights_are_the_same_in_every_dtype():
    wide, half, brain = (
        flat(dummy_weights(BIASED, dtype=dtype, device="cpu", seed=0), BIASED)
        for dtype in ("float32", "float16", "bfloat16")
    )
    assert torch.equal(wide, brain)
    assert (wide - half).abs().max() < 2**-24  # below the smallest normal number of float16


def test_dummy_weights_fill_every_tensor_at_its_scale():
    config = replace(BIASED, hidden_size=256, vocab_size=20_000, num_heads=8, head_dim=32)
    weights = dummy_weights(config, dtype="float32", device="cpu", seed=0)
    for name, slot in weights.slots(config):
        size = 0.1 if slot.dim() == 1 else slot.shape[1] ** -0.5
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        spread = float((slot - centre).square().mean().sqrt())
        assert 0.3 * size < spread < 2 * size, name
    # Larger than the noise it is tiled from, yet no two rows are alike.
    assert weights.embedding.numel() > 2**22
    assert len(weights.embedding.unique(dim=0)) == config.vocab_size
