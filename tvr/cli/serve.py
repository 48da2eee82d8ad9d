"""`tvr serve`: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import os
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tvr.cli import options
from tvr.cli.exits import EXIT_ERROR, EXIT_INTERRUPTED
from tvr.cli.output import remark
from tvr.errors import ConfigError, KernelError

#: What the extra `serve` brings.
_NEEDED = ("fastapi", "prometheus_client", "pydantic", "uvicorn")

_KEY_VARIABLE = "TVR_API_KEY"

#: Connections for which the process asks for room, idle ones included.
_MOST_CLIENTS = 16_384

_MIB, _MOST_MIB = 1 << 20, 900


def serve(
    *,
    model: options.Model = options.DEMO,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: on all addresses.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0: any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=_KEY_VARIABLE,
            metavar="KEY",
            help="Ask for this key, on every route but /health; may be given again.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model; may be given again. Default: its own name.",
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(metavar="N", help="Answers that may wait; more are refused by 429.")
    ] = 1024,
    max_body_mb: Annotated[
        float, typer.Option(metavar="X", help="Longest body of a request, in MiB.")
    ] = 8.0,
    drain_s: Annotated[
        float,
        typer.Option(metavar="X", help="Seconds that answers may take to end after SIGTERM."),
    ] = 30.0,
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", help="Most answers that run at once.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens of a step. Fewer: long prompts keep other answers waiting less.",
        ),
    ] = None,
    load_format: options.LoadFormat = "auto",
    plugins: options.Plugins = None,
    strict: options.Strict = False,
    enforce_eager: options.EnforceEager = False,
    debug: options.Debug = False,
) -> int:
    """Serve a model at /v1/completions and /v1/chat/completions, as OpenAI's API does.

    SIGTERM or Ctrl-C ends it when the answers under way are complete; a second one at once.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tvr serve needs {', '.join(missing)}, which is not installed; "
            "pip install 'tvr[serve]'"
        )
    if not 0 < max_body_mb <= _MOST_MIB:
        raise ConfigError(
            f"--max-body-mb is {max_body_mb:g}; it must be above 0, at most {_MOST_MIB}"
        )
    if not api_key and os.environ.get(_KEY_VARIABLE) is not None:
        raise ConfigError(
            f"{_KEY_VARIABLE} is set and empty; put a key in it, or unset it to serve without one"
        )
    from tvr.core.garbage import frozen_objects
    from tvr.serve.server import Server, bind, url_of
    from tvr.serve.service import Service
    from tvr.serve.settings import ServeSettings

    settings = ServeSettings(
        model_names=tuple(served_model_name or [_name_of(model)]),
        api_keys=tuple(api_key or ()),
        max_waiting=max_waiting,
        max_body_bytes=int(max_body_mb * _MIB),
        drain_s=drain_s,
    )
    options.allow_sockets(_MOST_CLIENTS)
    # Before the model is loaded, which may take a while.
    with (
        bind(host, port) as sock,
        options.open_llm(
            model,
            backend=backend,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            load_format=load_format,
            plugins=plugins,
            strict=strict,
            enforce_eager=enforce_eager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ) as llm,
    ):
        server = Server(Service(llm, settings), sock)
        names, url = ", ".join(settings.model_names), url_of(sock)
        # A collection that looks through all that is loaded keeps every client waiting for 0.3 s.
        is_frozen = frozen_objects().freeze()
        try:
            server.run(lambda: remark(f"{names} is served at {url}"))
        except KernelError as error:
            _end_now(error, debug)
        finally:
            if is_frozen:
                frozen_objects().unfreeze()
    return EXIT_INTERRUPTED if server.interrupted else 0


def _end_now(error: KernelError, debug: bool) -> NoReturn:
    """End the process: an ordinary end waits for the device, which may be lost or hang."""
    if debug:
        traceback.print_exc()
    remark(f"error: {error}")
    os._exit(EXIT_ERROR)


def _name_of(model: str) -> str:
    """Return a model's own name: a folder's or file's without what it lies in, or a hub's id."""
    path = Path(model)
    if not path.exists():
        return model
    return path.resolve().stem if path.suffix == ".gguf" else path.resolve().name
