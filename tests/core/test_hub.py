"""Models of the Hugging Face hub, with no network: its cache as it lies on disk."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from support.checkpoints import SHAPES, build_model, save_checkpoint
from support.engines import DEFAULT_SHAPE, engine, greedy, prompts_of, save_shape, tokens_of
from tvr.core.checkpoint_source import open_checkpoint
from tvr.core.hub import cached_models, resolve_model
from tvr.errors import CheckpointError, ConfigError

huggingface_hub = pytest.importorskip("huggingface_hub")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def into_cache(cache: Path, repo_id: str, source: Path) -> Path:
    """Lay `source` out as the hub's cache does; return the snapshot, a folder of links."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        name = hashlib.sha256(file.name.encode()).hexdigest()
        (repo / "blobs" / name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", name))
    return snapshot


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, which has no network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(folder), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_a_cached_model_loads_by_its_id_with_no_network(cache, plain):
    snapshot = into_cache(cache, "someone/small", plain)
    assert resolve_model("someone/small") == snapshot
    prompts, params = prompts_of([5, 9]), greedy(6)
    with engine("someone/small") as by_id, engine(plain) as by_path:
        found, expected = (tokens_of(e.generate(prompts, params)) for e in (by_id, by_path))
    assert found == expected


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_link_that_leads_nowhere_is_named_with_its_target(cache, plain, name):
    snapshot = into_cache(cache, "someone/small", plain)
    target = (snapshot / name).readlink()
    (snapshot / name).resolve().unlink()
    with pytest.raises(CheckpointError, match=name) as caught:
        open_checkpoint(snapshot).load_weights(dtype="float32", device="cpu")
    assert str(target) in str(caught.value)


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("missing", [None, SHARD, "tokenizer.json", "config.json"])
def test_a_snapshot_broken_off_is_completed_when_there_is_a_network(
    cache, plain, monkeypatch, missing
):
    snapshot = into_cache(cache, "someone/small", plain)
    (snapshot / "tokenizer.json").write_text("{}")
    if missing is not None:
        (snapshot / missing).unlink()
    asked = []

    def download(repo_id, *, local_files_only=False, **more):
        asked.append(local_files_only)
        if not local_files_only:
            files = ["config.json", "model.safetensors", "consolidated.safetensors", "a.bin"]
            wanted = huggingface_hub.utils.filter_repo_objects(files, **more)
            assert list(wanted) == ["config.json", "model.safetensors"]
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("someone/small") == snapshot
    assert asked == ([True] if missing is None else [True, False])


def test_a_snapshot_broken_off_is_refused_naming_what_it_lacks_without_one(cache, plain):
    snapshot = into_cache(cache, "someone/small", plain)
    (snapshot / SHARD).unlink()
    path = resolve_model("someone/small")
    with pytest.raises(CheckpointError, match=SHARD):
        open_checkpoint(path).load_weights(dtype="float32", device="cpu")


def test_the_folder_of_a_user_who_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="~no-such-user/m' cannot be used"):
        resolve_model("~no-such-user/m")


def test_the_snapshot_listed_is_the_one_that_loads(cache, plain):
    """Another revision may have been fetched later."""
    snapshot = into_cache(cache, "someone/small", plain)
    other = snapshot.parent / COMMIT[::-1]
    other.mkdir()
    blob = snapshot.parents[1] / "blobs" / "later"
    blob.write_text("{}")
    os.utime(blob, (2e9, 2e9))
    (other / "config.json").symlink_to(Path("..", "..", "blobs", "later"))
    (model,) = cached_models()
    assert model.path == snapshot == resolve_model("someone/small")


@pytest.mark.parametrize("name", ["nobody/nothing", "a--b/c..d"])
def test_an_id_that_cannot_be_had_is_refused_with_the_reason(cache, name):
    with pytest.raises(ConfigError, match="there is no such directory, and the Hugging") as caught:
        resolve_model(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "../a/b", "nowhere", "a/b/c", Path("a/b")])
def test_what_is_no_hub_id_stays_a_path(cache, name):
    assert resolve_model(name) == Path(name)


def test_a_directory_goes_before_a_hub_id(tmp_path, monkeypatch, cache, plain):
    monkeypatch.chdir(tmp_path)
    into_cache(cache, "someone/small", plain)
    (tmp_path / "someone" / "small").mkdir(parents=True)
    assert resolve_model("someone/small") == Path("someone/small")


def test_cached_models_are_listed_without_data_sets(cache, plain):
    assert cached_models() == []
    for name in ("b/two", "a/one"):
        into_cache(cache, name, plain)
    (cache / "datasets--x--y" / "snapshots" / COMMIT).mkdir(parents=True)
    found = cached_models()
    assert [m.repo_id for m in found] == ["a/one", "b/two"]
    assert found[0].path.name == COMMIT
    assert found[0].size_bytes == sum(f.stat().st_size for f in plain.iterdir())


def test_a_lora_adapter_is_refused_by_name(tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    for _ in range(2):  # with and without a config.json beside it
        with pytest.raises(ConfigError, match="LoRA adapter") as caught:
            open_checkpoint(tmp_path)
        assert "meta-llama/Llama-3.2-1B" in str(caught.value)
        assert "merge" in str(caught.value)
        (tmp_path / "config.json").write_text("{}")


def test_an_adapter_beside_full_weights_is_not_left_out_in_silence(tmp_path):
    path = save_shape(tmp_path)
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"remove adapter_config\.json"):
        open_checkpoint(path)


def test_progress_of_reading_the_weights_reaches_the_whole(tmp_path):
    shape = SHAPES[DEFAULT_SHAPE]
    model = build_model(shape)
    seen: list[tuple[int, int]] = []
    with engine(save_checkpoint(model, shape, tmp_path), progress=lambda *p: seen.append(p)):
        pass
    size = sum(p.numel() * torch.float32.itemsize for p in model.parameters())
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
