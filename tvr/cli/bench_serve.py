"""`tvr bench serve`: how fast a server answers, whoever made it."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvr.cli import options
from tvr.cli.bench_options import JsonFile, refuse_too_many, whole
from tvr.cli.bench_run import command_line
from tvr.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from tvr.cli.output import check_can_write, remark, text_writer
from tvr.cli.progress import suite_bar
from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.bench.serve_client import Target
    from tvr.bench.serve_load import Load

#: Of the request that comes before the load.
_FIRST_SEED = -1


def serve(
    more_goodput: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME:MS]...", help="More limits, behind that of --goodput."),
    ] = None,
    *,
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The server, such as http://127.0.0.1:8000.")
    ],
    endpoint: Annotated[
        str, typer.Option(metavar="PATH", help="What to ask; or /v1/chat/completions.")
    ] = "/v1/completions",
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As the server knows it. Default: the first it lists."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(metavar="N", help="Requests.")] = 1000,
    input_len: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer.")] = 128,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ids of prompts are below this, and below 10,000."),
    ] = None,
    random_seed: Annotated[
        int, typer.Option(metavar="N", help="Of prompts and times of arrival.")
    ] = 0,
    request_rate: Annotated[
        float, typer.Option(metavar="X", help="Requests a second, at random; inf: all at once.")
    ] = math.inf,
    max_concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Most requests under way. Default: any number.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of the full length.")
    ] = False,
    percentile_metrics: Annotated[
        str, typer.Option(metavar="NAME,...", help="Shown: of ttft, tpot, itl and e2el.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[
        str, typer.Option(metavar="X,X,...", help="Percentiles of each.")
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="Count requests within this: ttft, tpot or e2el."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", help="Sent as a bearer token."),
    ] = None,
    json_file: JsonFile = None,
    debug: options.Debug = False,
) -> int:
    """Measure an OpenAI-compatible server under load, with vLLM's options and report.

    A first request, which is not measured, finds out how the server wants to be asked. Exit code 1
    if a request of the load failed.
    """
    for name, value in (
        ("--num-prompts", num_prompts),
        ("--input-len", input_len),
        ("--output-len", output_len),
        ("--max-concurrency", 1 if max_concurrency is None else max_concurrency),
        ("--vocab-size", 1 if vocab_size is None else vocab_size),
    ):
        whole(name, value, 1)
    if not request_rate > 0:
        raise ConfigError(f"--request-rate is {request_rate:g}; it must be above 0, or inf")
    scheme, _, host = base_url.partition("://")
    if scheme not in ("http", "https") or not host.strip("/"):
        raise ConfigError(f"--base-url {base_url!r} must be http:// or https:// and a host")
    if not endpoint.startswith("/"):
        raise ConfigError(f"--endpoint {endpoint!r} must begin with a slash")
    if more_goodput and not goodput:
        raise ConfigError(f"{more_goodput[0]!r} stands alone; limits come behind --goodput")
    shown = _chosen(percentile_metrics)
    percentiles = _percentiles(metric_percentiles)
    check_can_write({"--json": json_file})
    if importlib.util.find_spec("httpx2") is None:
        raise ConfigError(
            "tvr bench serve needs httpx2, which is not installed; pip install 'tvr[bench]'"
        )
    from tvr.bench.report import write_json
    from tvr.bench.serve_load import Load, arrival_times, text_prompts
    from tvr.bench.serve_metrics import metrics_of, parse_goodput
    from tvr.bench.serve_report import format_serve, serve_header, serve_row
    from tvr.bench.workload import LARGEST_ID, random_prompts

    limits = parse_goodput([*(options.listed(goodput) or ()), *(more_goodput or ())])
    vocab = vocab_size or LARGEST_ID
    refuse_too_many(num_prompts, input_len)
    options.allow_sockets(max_concurrency or num_prompts)
    options.allow_interrupts()
    served = _Served(load=Load())
    asked = _serve(
        served,
        base_url.rstrip("/"),
        endpoint,
        model,
        api_key,
        output_len=output_len,
        ignore_eos=ignore_eos,
        first=(
            random_prompts(1, input_len, vocab, _FIRST_SEED)[0],
            text_prompts(1, input_len, _FIRST_SEED)[0],
        ),
        ids=random_prompts(num_prompts, input_len, vocab, random_seed),
        texts=text_prompts(num_prompts, input_len, random_seed),
        times=arrival_times(num_prompts, request_rate, random_seed),
        max_concurrency=max_concurrency,
    )
    try:
        asyncio.run(asked)
    except KeyboardInterrupt:
        if not served.load.answers:
            raise
    num_left = num_prompts - len(served.load.answers)
    assert served.target is not None, "somebody answered"
    fields = {
        "backend": "openai",
        "endpoint": endpoint,
        "model": served.target.model,
        "prompts": "token ids" if served.by_ids else "text",
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "seed": random_seed,
        "request_rate": "inf" if math.isinf(request_rate) else request_rate,
        "max_concurrency": max_concurrency,
        "ignore_eos": ignore_eos,
    }
    row = serve_row(fields, metrics_of(served.load, percentiles, limits), served.load)
    if json_file is not None:
        command = _without_key(command_line(), api_key)
        write_json(json_file, serve_header(command, base_url, interrupted=num_left > 0), [row])
    counted = any(a.usage is None for a in served.load.answers if a.error is None)
    remarks = ["tokens are counted by chunks: the server sends no usage"] if counted else []
    if num_left:
        remarks.append(f"interrupted: {num_left} of {num_prompts} requests were not answered")
    text_writer()(format_serve(row, shown, percentiles, remarks))
    if num_left:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if row["failed"] else 0


@dataclass
class _Served:
    """What the server has agreed to, and has answered so far."""

    load: Load
    target: Target | None = None
    by_ids: bool = False


async def _serve(
    served: _Served,
    base_url: str,
    endpoint: str,
    model: str | None,
    api_key: str | None,
    *,
    output_len: int,
    ignore_eos: bool,
    first: tuple[list[int], str],
    ids: list[list[int]],
    texts: list[str],
    times: list[float],
    max_concurrency: int | None,
) -> None:
    """Agree with the server and put the load on it; `served` gets what comes."""
    from tvr.bench.serve_client import Target, agree, first_model, open_clients
    from tvr.bench.serve_load import put_load

    async with open_clients(api_key, min(max_concurrency or len(ids), len(ids))) as clients:
        asked = Target(
            base_url=base_url,
            endpoint=endpoint,
            model=model or await first_model(clients[0], base_url),
            output_len=output_len,
            ignore_eos=ignore_eos,
        )
        served.target, served.by_ids, why = await agree(clients[0], asked, *first)
        if why is not None:
            remark(f"prompts are text, as the server refuses token ids: {why}")
        prompts: list[Any] = ids if served.by_ids else texts
        with suite_bar(len(prompts)) as report:
            await put_load(
                clients,
                served.target,
                prompts,
                times=times,
                max_concurrency=max_concurrency,
                report=lambda done: report(done, "requests"),
                into=served.load,
            )


def _chosen(text: str) -> list[str]:
    from tvr.bench.serve_metrics import METRICS

    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(
            f"--percentile-metrics {unknown[0]!r} is not known; known: {', '.join(METRICS)}"
        )
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= p <= 100 for p in found):
        raise ConfigError(
            f"--metric-percentiles {text!r} is no list of numbers from 0 to 100, as in 50,99"
        )
    return found


def _without_key(command: str, api_key: str | None) -> str:
    return command.replace(api_key, "...") if api_key else command
