"""The command line. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import sys

from tvr.cli.app import app


def main() -> None:
    """Run `tvr`. Errors are one line on stderr and exit code 2; `--debug` shows the traceback."""
    from tvr.cli.app import run_app

    sys.exit(run_app(app, sys.argv[1:]))


__all__ = ["app", "main"]
