"""`tvr models`: the models on this machine that tvr can find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tvr.cli.output import columns
from tvr.errors import ConfigError, TvrError

if TYPE_CHECKING:
    from tvr.core.config import ModelConfig


class Found(NamedTuple):
    """A model and how to name it: to `--model`, where it lies, and what is known of it."""

    name: str
    source: str
    detail: str
    supported: bool


def models(
    folder: Annotated[Path, typer.Argument(help="Folder to look in, three levels deep.")] = Path(),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the demo model, those in the Hugging Face cache, and those under a folder.

    The first column is what `--model` takes.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one to look for models in")
    found = find_models(folder)
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in found], indent=2))
        return
    rows = [("model", "found in", "what it is"), *(row[:3] for row in found)]
    for line in columns(rows):
        typer.echo(line)


def find_models(folder: Path) -> list[Found]:
    """Return every model found, the demo first."""
    from tvr import demo
    from tvr.core.hub import cached_models

    rows = [_describe("demo", "the package", demo.path())]
    rows += [_describe(m.repo_id, "hub cache", m.path) for m in cached_models()]
    for path in _checkpoints(folder):
        rows.append(_describe(str(path), "folder", path))
    return rows


def _checkpoints(folder: Path) -> list[Path]:
    """Return directories with a config.json and weights, and GGUF files, in `folder`."""
    found: list[Path] = []
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        directories = [p.parent for p in folder.glob(f"{depth}config.json")]
        found += [d for d in directories if any(d.glob("*.safetensors"))]
        found += folder.glob(f"{depth}*.gguf")
    return sorted(found)


def _describe(name: str, source: str, path: Path) -> Found:
    from tvr.core.checkpoint import read_headers
    from tvr.core.checkpoint_source import HuggingFaceCheckpoint, open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
        if isinstance(checkpoint, HuggingFaceCheckpoint):
            read_headers(path)  # a config alone is no model
    except (TvrError, OSError) as error:
        return Found(name, source, f"cannot be run: {error}", False)
    return Found(name, source, _summary(checkpoint.config), True)


def _summary(config: ModelConfig) -> str:
    millions = config.num_parameters / 1e6
    size = f"{millions / 1e3:.2f} B" if millions >= 1000 else f"{millions:.1f} M"
    return (
        f"{config.architecture}, {size} parameters, {config.dtype}, "
        f"context {config.max_position_embeddings}"
    )
