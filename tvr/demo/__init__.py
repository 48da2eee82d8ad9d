"""The demo model: a small Llama that writes in the manner of Shakespeare's plays.

A Hugging Face directory like any other, shipped inside the package so that the first command
needs no download. How it was made: docs/demo-model.md.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the directory of the checkpoint."""
    return Path(__file__).parent
