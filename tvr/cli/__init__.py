"""The command line. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run `tvr`. Errors are one line on stderr and exit code 2; `--debug` shows the traceback."""
    if sys.stderr is None:
        # With stderr closed, `print(file=sys.stderr)` would print to stdout.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        from tvr.cli.app import app, run_app

        code = run_app(app, sys.argv[1:])
    except KeyboardInterrupt:  # so early that we were still importing
        code = 130
    sys.exit(code)
