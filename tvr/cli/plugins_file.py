"""Where the command line takes its plug-in configuration from."""

from __future__ import annotations

import os


def find_plugins_file(option: str | None) -> str | None:
    """Return `--plugins`, else `TVR_PLUGINS`, else None (`./plugins.toml`, then the default)."""
    return option or os.environ.get("TVR_PLUGINS") or None
