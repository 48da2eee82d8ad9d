"""`tvr bench latency` and `tvr bench throughput`: how fast backends serve a whole model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvr.cli import options
from tvr.cli.bench_options import Backends, JsonFile, numbers, refuse_too_many, whole
from tvr.cli.bench_run import check_picture, command_line, run_steps
from tvr.cli.output import check_can_write
from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.bench.engine_model import BenchModel
    from tvr.bench.rows import Row

#: Percentiles of fewer say nothing.
_LEAST_ITERS = 5

#: Tokens of a random prompt and of its answer.
_RANDOM_LEN = 128

#: Fields of `SamplingParams` that the benchmark sets itself.
_OWN = ("n", "max_tokens", "ignore_eos")

_WORKLOADS = ("random", "nano")


def latency(
    *,
    model: options.Model = options.DEMO,
    backend: Backends = None,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Requests at once.")] = "8",
    input_len: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of a prompt.")] = "32",
    output_len: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer.")] = 128,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="BxIN+OUT,...", help="Batches of sizes of their own, instead of those three."
        ),
    ] = None,
    sampling: Annotated[
        str,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="How tokens are chosen, as in temperature=0.8,top_p=0.95.",
        ),
    ] = "",
    num_iters_warmup: Annotated[int, typer.Option(metavar="N", help="Untimed iterations.")] = 10,
    num_iters: Annotated[int, typer.Option(metavar="N", help="Timed iterations, at least 5.")] = 30,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw ITL by batch and context, and its limit."),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    load_format: options.LoadFormat = "auto",
    plugins: options.Plugins = None,
    enforce_eager: options.EnforceEager = False,
    batch_invariant: options.BatchInvariant = False,
    debug: options.Debug = False,
) -> int:
    """Measure the time to the first token and between tokens, backends side by side.

    Each backend's logits are checked before it is timed; exit code 1 if they are wrong.
    """
    whole("--output-len", output_len, 2)  # one for TTFT, one more for ITL
    whole("--num-iters-warmup", num_iters_warmup, 0)
    whole("--num-iters", num_iters, _LEAST_ITERS)
    chosen = [_sampling(one) for one in sampling.split(";")]
    lens = numbers("--input-len", input_len)
    asked = [(b, n, output_len) for n in lens for b in numbers("--batch", batch)]
    if sizes is not None:
        if asked != [(8, 32, 128)]:  # not the defaults: these were given, too
            raise ConfigError("--sizes says all; leave out --batch, --input-len and --output-len")
        asked = _sizes(sizes)
    check_can_write({"--json": json_file, "--plot": plot})
    if plot is not None:
        check_picture(plot)
    with redirect_stdout(sys.stderr):  # what a plugin prints belongs to no table
        opened = open_model(
            model,
            device,
            dtype,
            load_format,
            max_model_len,
            plugins,
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
        )
        from tvr.bench.engine_latency import Batch, Latency, sampling_name
        from tvr.bench.model_table import format_latency

        backends = opened.backends(options.listed(backend))
        batches = [Batch(*one) for one in asked]
        names = list(backends)
        measuring = Latency(
            opened,
            names,
            batches,
            samplings=chosen,
            num_warmup=num_iters_warmup,
            num_iters=num_iters,
        )
        protocol = {"warmup_iterations": num_iters_warmup, "iterations": num_iters}
        header = opened.header(command_line(), backends, protocol)
        if plot is not None or opened.device.type == "cuda":  # so that the file can be drawn later
            from tvr.bench.engine_limit import memory_limit

            header |= memory_limit(opened)

    def draw(header: dict[str, Any], rows: list[Row]) -> None:
        if plot is not None:
            from tvr.bench.plot_itl import plot_itl

            plot_itl(plot, header, rows)

    return run_steps(
        measuring.rows(),
        [f"{one} {sampling_name(how)}" for one in batches for how in chosen],
        header=lambda: header,
        table=lambda found: format_latency(found, names),
        json_file=json_file,
        draw=draw,
    )


def throughput(
    *,
    model: options.Model = options.DEMO,
    backend: Backends = None,
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="random: all of one size; nano: nano-vllm's, 100 to 1024 tokens."
        ),
    ] = "random",
    num_prompts: Annotated[int, typer.Option(metavar="N", help="Requests.")] = 256,
    input_len: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of a prompt. Default: 128.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of an answer. Default: 128.")
    ] = None,
    random_seed: Annotated[int, typer.Option(metavar="N", help="Of the prompts.")] = 0,
    num_iters: Annotated[int, typer.Option(metavar="N", help="Times it is served.")] = 3,
    json_file: JsonFile = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    load_format: options.LoadFormat = "auto",
    plugins: options.Plugins = None,
    enforce_eager: options.EnforceEager = False,
    batch_invariant: options.BatchInvariant = False,
    debug: options.Debug = False,
) -> int:
    """Measure how fast many requests that come all at once are served.

    Each backend's logits are checked before it is timed; exit code 1 if they are wrong.
    """
    if workload not in _WORKLOADS:
        raise ConfigError(f"--workload {workload!r} is not known; known: {', '.join(_WORKLOADS)}")
    if workload == "nano" and (input_len is not None or output_len is not None):
        raise ConfigError(
            "--workload nano has lengths of its own; leave out --input-len and --output-len"
        )
    input_len = _RANDOM_LEN if input_len is None else input_len
    output_len = _RANDOM_LEN if output_len is None else output_len
    for name, value in (
        ("--num-prompts", num_prompts),
        ("--input-len", input_len),
        ("--output-len", output_len),
        ("--num-iters", num_iters),
    ):
        whole(name, value, 1)
    check_can_write({"--json": json_file})
    with redirect_stdout(sys.stderr):
        opened = open_model(
            model,
            device,
            dtype,
            load_format,
            max_model_len,
            plugins,
            enforce_eager=enforce_eager,
            batch_invariant=batch_invariant,
        )
        from tvr.bench.engine_throughput import Throughput
        from tvr.bench.model_table import format_throughput
        from tvr.bench.workload import NANO_LENGTHS, nano_workload, random_workload

        vocab_size = opened.config.vocab_size
        if workload == "nano":
            refuse_too_many(num_prompts, sum(NANO_LENGTHS) // 2)
            requests = nano_workload(num_prompts, vocab_size, random_seed)
        else:  # what does not fit is refused before prompts of that length are made
            opened.refuse_longer("workload 'random'", input_len + output_len)
            refuse_too_many(num_prompts, input_len)
            requests = random_workload(num_prompts, input_len, output_len, vocab_size, random_seed)
        backends = opened.backends(options.listed(backend))
        names = list(backends)
        measuring = Throughput(opened, names, requests, num_iters=num_iters)
        header = opened.header(command_line(), backends, {"iterations": num_iters})
    return run_steps(
        measuring.rows(),
        [f"{name}: {requests}" for name in names],
        header=lambda: header,
        table=format_throughput,
        json_file=json_file,
    )


def open_model(
    model: str,
    device: str,
    dtype: str,
    load_format: str,
    max_model_len: int | None,
    plugins: str | None,
    *,
    enforce_eager: bool,
    batch_invariant: bool,
) -> BenchModel:
    """Return the model of the options."""
    from tvr.bench.engine_model import BenchModel
    from tvr.core.plugin_config import find_config

    return BenchModel.open(
        options.model_path(model),
        name=Path(model).resolve().name if Path(model).exists() else model,
        device=device,
        dtype=dtype,
        load_format=load_format,
        max_model_len=max_model_len,
        plugins=find_config(plugins, os.environ),
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
    )


def _sizes(text: str) -> list[tuple[int, int, int]]:
    """Return the batch, prompt and answer of each size in "1x128+512,8x128+256"."""
    found = [re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*\+\s*(\d+)\s*", one) for one in text.split(",")]
    if not all(found):
        raise ConfigError(
            f"--sizes {text!r} is not of the form BATCHxPROMPT+ANSWER,..., as in 1x128+512,8x32+256"
        )
    sizes = [tuple(map(int, match.groups())) for match in found if match is not None]
    for batch, prompt, answer in sizes:
        whole("--sizes, a batch", batch, 1)
        whole("--sizes, a prompt", prompt, 1)
        whole("--sizes, an answer", answer, 2)
    return sizes  # type: ignore[return-value]


def _sampling(text: str) -> dict[str, Any]:
    """Return the parameters in "temperature=0.8,top_p=0.95"."""
    from tvr.core.sampling_params import SamplingParams

    chosen: dict[str, Any] = {}
    if text.strip() in ("", "greedy"):
        return chosen
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            chosen[name.strip()] = json.loads(value)
        except ValueError as error:
            raise ConfigError(
                f"--sampling {part!r} is not NAME=NUMBER, as in temperature=0.8"
            ) from error
    for name in _OWN:
        if name in chosen:
            raise ConfigError(f"--sampling {name} is the benchmark's own; leave it out")
    try:
        SamplingParams(**chosen)
    except TypeError as error:
        known = (f.name for f in dataclasses.fields(SamplingParams))
        names = ", ".join(name for name in known if name not in _OWN)
        raise ConfigError(f"--sampling {text!r} has an unknown name; known: {names}") from error
    return chosen
