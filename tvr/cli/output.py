"""What the commands print: answers on stdout, remarks on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tvr.errors import ConfigError


def remark(message: str) -> None:
    """Print one line on stderr."""
    print(f"tvr: {' '.join(message.split())}", file=sys.stderr, flush=True)


def text_writer() -> Callable[[str], None]:
    """Return a function that writes text to stdout at once, whatever stdout can encode."""
    if sys.stdout is None:
        raise ConfigError("stdout is closed; there is nowhere to write the answer")
    encoding = sys.stdout.encoding or "utf-8"

    def write(text: str) -> None:
        # A narrow terminal encoding must not end the answer: what it lacks becomes '?'.
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()

    return write
