"""The command line. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run `tvr`. Errors are one line on stderr and exit code 2; `--debug` shows the traceback."""
    if sys.stderr is None:
        # With stderr closed, `print(file=sys.stderr)` would print to stdout.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    # Until a command is ready for an interrupt (`tvr.cli.options.allow_interrupts`), it ends the
    # process at once: an exception would go through imports, and through C++ that cannot take one.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from tvr.cli.app import app, run_app

    code = run_app(app, sys.argv[1:])
    # A second Ctrl-C must not break off the process's own end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
