"""The typer app: which commands there are, and how a failure leaves the process."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from tvr.cli import backend_new, bench, kernels
from tvr.cli.backends import backends
from tvr.cli.chat import chat
from tvr.cli.conformance import conformance
from tvr.cli.env import env
from tvr.cli.exits import EXIT_ERROR, EXIT_INTERRUPTED
from tvr.cli.models import models
from tvr.cli.profile import profile
from tvr.cli.run import run
from tvr.cli.serve import serve
from tvr.errors import TvrError

app = typer.Typer(
    name="tvr",
    help="Run Llama-family models through plug-in kernels.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(short_help="Continue a text or answer a question.")(run)
app.command(short_help="Talk with a model that remembers the conversation.")(chat)
app.command(short_help="Serve a model as OpenAI's API does.")(serve)
app.command(short_help="List the models on this machine.")(models)
app.command(short_help="List the backends, and who serves which op.")(backends)
app.add_typer(backend_new.app, name="backend", short_help="Write a backend of your own.")
app.command(short_help="Check whether a backend keeps the contract.")(conformance)
app.add_typer(bench.app, name="bench", short_help="Measure how fast backends are.")
app.command(short_help="Trace some steps: what runs when.")(profile)
app.add_typer(kernels.app, name="kernels", short_help="Compile CUDA kernels ahead.")
app.command(short_help="Print what a bug report needs.")(env)


def _show_version(wanted: bool) -> None:
    if wanted:
        from tvr import __version__

        typer.echo(f"tvr {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run Llama-family models through plug-in kernels."""


def run_app(app: typer.Typer, arguments: list[str]) -> int:
    """Run the app on `arguments` and return the exit code."""
    try:
        code = app(arguments or ["--help"], prog_name="tvr", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return 0  # typer has printed a shell's completions
        # The reader of our output went away, which typer may tell by SystemExit; nothing is left
        # to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except typer.TyperException as error:
        return _fail(error.format_message() if hasattr(error, "format_message") else str(error))
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exc()
            return EXIT_ERROR
        if isinstance(error, (TvrError, OSError)):
            return _fail(str(error))
        # Nobody's mistake but ours or a plug-in's; still a line that says what to do.
        return _fail(f"{type(error).__name__}: {error}; this is a bug, --debug shows where")


def _fail(message: str) -> int:
    one_line = " ".join(message.split())
    print(f"tvr: error: {one_line}", file=sys.stderr)
    return EXIT_ERROR
