"""The command line run inside the test's own process: a start costs seconds, a call does not."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from tvr.cli.app import app, run_app


class Done(NamedTuple):
    """What a command left, under `subprocess`'s names."""

    returncode: int
    stdout: str
    stderr: str


def run_here(*args: object, stdin: str | bytes = "") -> Done:
    """Run `tvr` with `args`; no stream is a terminal."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = sys.stdin, sys.argv
    sys.argv = ["tvr", *map(str, args)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(data), "utf-8")
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run_app(app, [str(arg) for arg in args])
    finally:
        sys.stdin, sys.argv = before
    return Done(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def refused_here(*args: object, stdin: str | bytes = "") -> str:
    """Run `tvr`, which must refuse; return its one line."""
    done = run_here(*args, stdin=stdin)
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tvr: error: ")
    return line
