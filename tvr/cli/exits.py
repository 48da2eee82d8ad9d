"""How a command ends: its exit codes."""

from __future__ import annotations

EXIT_FAILED = 1  # the work was done, and something in it failed or is wrong
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
