"""Models of the Hugging Face hub: what is in the local cache, and fetching what is not."""

from __future__ import annotations

import re
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from tvr.core.checkpoint import INDEX_NAME
from tvr.core.text_files import read_json
from tvr.errors import CheckpointError, ConfigError

#: What a snapshot is for; other forms of the weights stay where they are.
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

#: Mistral's own form of the weights, as large as the other and beside it.
OTHER_FORMS = ["consolidated*"]

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class CachedModel(NamedTuple):
    """A model in the hub's local cache: its id, its main or newest snapshot, bytes on disk."""

    repo_id: str
    path: Path
    size_bytes: int


def resolve_model(model: str | PathLike[str]) -> Path:
    """Return the local path of `model`: itself if it exists, else the snapshot of a hub id.

    The cache is looked at first, so a model fetched once needs no network.

    Raises:
        ConfigError: `model` is no path and cannot be had from the hub; says what to do.
    """
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ConfigError(f"model {model!r} cannot be used: {error}") from error
    if path.exists() or not isinstance(model, str) or not _HUB_ID.fullmatch(model):
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"model {model!r}: there is no such directory; if it is a model of the Hugging Face "
            "hub, pip install huggingface_hub to have it fetched"
        ) from None
    try:
        with suppress(LocalEntryNotFoundError):  # not fetched yet
            cached = Path(snapshot_download(model, local_files_only=True, allow_patterns=FILES))
            if _is_complete(cached):
                return cached
        return Path(snapshot_download(model, allow_patterns=FILES, ignore_patterns=OTHER_FORMS))
    # The library raises errors of its own, of its HTTP library and of the system.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model {model!r}: there is no such directory, and the Hugging Face hub does not give "
            f"it ({type(error).__name__}: {reason})"
        ) from error


def cached_models() -> list[CachedModel]:
    """Return the models in the hub's local cache; none without the `huggingface_hub` package."""
    try:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    found = []
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.revisions:
            # The main one is what `resolve_model` takes.
            best = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
            found.append(CachedModel(repo.repo_id, best.snapshot_path, best.size_on_disk))
    return sorted(found)


def _is_complete(path: Path) -> bool:
    """Whether a snapshot has config, weights and a tokenizer.

    A download may have been broken off, or have been another program's, of the weights alone.
    """
    if not (path / "config.json").exists():
        return False
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return False
    if not (path / INDEX_NAME).exists():
        return any(file.exists() for file in path.glob("*.safetensors"))
    try:
        shards = read_json(path / INDEX_NAME)["weight_map"].values()
    except (CheckpointError, KeyError, AttributeError):
        return False
    return all((path / shard).exists() for shard in set(shards))
