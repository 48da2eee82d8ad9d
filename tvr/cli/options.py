"""Options that commands share, and the engine they ask for."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

if TYPE_CHECKING:
    from tvr.core.llm import LLM
    from tvr.core.watcher import Watcher

#: `--model demo`; the default. A path or hub id of that name goes before it.
DEMO = "demo"

Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="A Hugging Face checkpoint directory, a .gguf file or a hub id; demo: the small model "
        "that comes with tvr.",
    ),
]
Backend = Annotated[
    str, typer.Option(metavar="NAME", help="Backend put first; auto: the configured order.")
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="0: always the likeliest token; 1: as the model says. Default: 0, demo: 0.8.",
    ),
]
TopP = Annotated[float, typer.Option(metavar="X", help="Sample from this much of the probability.")]
TopK = Annotated[int, typer.Option(metavar="N", help="Sample from this many tokens; 0: all.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Equal seeds draw equal tokens.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text; may be given again."),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of a chat.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, float16 or bfloat16.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
MaxModelLen = Annotated[
    int | None, typer.Option(metavar="N", help="Most tokens of prompt and answer together.")
]
LoadFormat = Annotated[
    str, typer.Option(metavar="NAME", help="auto, safetensors, gguf, or dummy: random weights.")
]
Plugins = Annotated[str | None, typer.Option(metavar="FILE", help="A plugins.toml to use.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse ops served by another than --backend, and broken plugins."
    ),
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="Launch steps op by op, none as a CUDA graph.")
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Only ops whose results do not depend, bit for bit, on what else is in a step.",
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print times, KV use and who served each op.")]
Shadow = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Repeat every op of --backend on this one; stop at the first fault."
    ),
]
ShadowFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Keep the call at fault here. Default: tvr-shadow-OP.safetensors."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


class EngineOptions(TypedDict):
    """The options of `open_llm` that go to the engine as they are."""

    backend: str
    dtype: str
    device: str
    max_model_len: int | None
    load_format: str
    plugins: str | None
    strict: bool
    enforce_eager: bool
    batch_invariant: bool


def model_path(model: str) -> Path:
    """Return where `--model` lies on disk, fetched from the hub if need be."""
    if model == DEMO and not Path(model).exists():
        from tvr import demo

        return demo.path()
    from tvr.core.hub import resolve_model

    return resolve_model(model)


def temperature_for(model: str, temperature: float | None) -> float:
    """Return `--temperature`, or its default: the demo model loops when greedy."""
    if temperature is not None:
        return temperature
    return 0.8 if model == DEMO else 0.0


def listed(values: list[str] | None) -> tuple[str, ...] | None:
    """Return names that were given one by one, with commas between, or both."""
    if values is None:
        return None
    return tuple(name.strip() for value in values for name in value.split(","))


def allow_interrupts() -> None:
    """From here on, Ctrl-C raises KeyboardInterrupt in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def allow_sockets(num_sockets: int) -> None:
    """Let this process have as many sockets, if the system allows it: 1,024 is a usual limit."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_sockets + 256  # and what the process has open anyway
    if soft < wanted and soft != resource.RLIM_INFINITY:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_llm(
    model: str,
    *,
    backend: str,
    dtype: str,
    device: str,
    max_model_len: int | None,
    load_format: str,
    plugins: str | None,
    strict: bool,
    enforce_eager: bool,
    batch_invariant: bool = False,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    needs_tokenizer: bool = True,
    shadow: Watcher | None = None,
) -> LLM:
    """Load the model and say which ops `backend`, named, does not serve.

    Raises:
        TvrError: as `LLM` does; or no tokenizer, found before the weights are read.
    """
    from tvr.cli.progress import loading_bar
    from tvr.core.checkpoint_source import open_checkpoint
    from tvr.core.llm import LLM
    from tvr.core.plugin_config import find_config

    path = model_path(model)
    if needs_tokenizer:
        open_checkpoint(path, load_format).require_tokenizer()
    # A plugin that prints when it is imported must not print into the answer.
    with redirect_stdout(sys.stderr), loading_bar() as progress:
        llm = LLM(
            path,
            backend=backend,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            load_format=load_format,
            plugins=find_config(plugins, os.environ),
            strict=strict,
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            shadow=shadow,
            progress=progress,
        )
    for passed in llm.parts.ops.passed_over:
        if passed.backend == backend:
            reasons = "; ".join(passed.reasons)
            print(f"tvr: {backend} does not serve {passed.op}: {reasons}", file=sys.stderr)
    allow_interrupts()
    return llm
