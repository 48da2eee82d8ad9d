"""`tvr conformance --replay`: the call that a shadow kept, made again."""

from __future__ import annotations

from pathlib import Path

from tvr.cli.exits import EXIT_FAILED
from tvr.core.plugin_config import PluginConfig


def replay_file(file: Path, backend: str, *, device: str, plugins: Path | None) -> int:
    """Make the call of `file` again on `backend`, say what came of it, and return the exit code.

    Raises:
        TvrError: the file, the backend or the device cannot be used.
    """
    from tvr.conformance.shadow_file import load, replay

    print(f"{file}: {load(file).finding}")
    result = replay(file, backend, device=device, config=PluginConfig.load(plugins))
    if result.outcome == "passed":
        print(f"{backend} on {device}: {result.op} is right; the fault does not show again")
        return 0
    verdict = "cannot be judged" if result.outcome == "skipped" else "it shows again"
    print(f"{backend} on {device}: {verdict}: {result.detail}")
    return EXIT_FAILED
