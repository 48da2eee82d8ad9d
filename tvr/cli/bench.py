"""`tvr bench`: how fast, measured side by side and only where the result is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvr.cli import options
from tvr.cli.bench_compare import compare
from tvr.cli.bench_model import latency, throughput
from tvr.cli.bench_options import Backends, JsonFile, numbers
from tvr.cli.bench_run import check_can_plot, run_cells
from tvr.cli.bench_serve import serve
from tvr.errors import ConfigError

app = typer.Typer()

Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32, float16 or bfloat16.")]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="cuda, cuda:N, or cpu: eagerly, by the clock.")
]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure how fast backends are."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Measure paged attention, backends side by side.")
def attention(
    *,
    backend: Backends = None,
    op: Annotated[str, typer.Option(metavar="NAME", help="decode, prefill or both.")] = "both",
    dtype: Dtype = "bfloat16",
    head_dim: Annotated[str, typer.Option(metavar="N,N,...", help="Widths of a head.")] = "64,128",
    num_heads: Annotated[int, typer.Option(metavar="N", help="Query heads.")] = 32,
    num_kv_heads: Annotated[int, typer.Option(metavar="N", help="KV heads.")] = 8,
    block_size: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens of a KV block.")
    ] = "16",
    batch: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Sequences of a decode, with each --ctx.")
    ] = None,
    ctx: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Tokens of a sequence. Default: a table of sizes."),
    ] = None,
    seq_lens: Annotated[
        str | None,
        typer.Option(
            metavar="N,CxN,...",
            help="One decode of sequences of these lengths, as 100000,63x512, instead.",
        ),
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw the decodes' bandwidth against bytes."),
    ] = None,
    device: Device = "cuda",
    plugins: options.Plugins = None,
    debug: options.Debug = False,
) -> int:
    """Measure paged attention, backends side by side, in CUDA graphs over cold memory.

    Each result is checked before it is timed; exit code 1 if one is wrong or fails.
    """
    from tvr.bench.cells import attention_cells

    ops = {"decode": ["attention_decode"], "prefill": ["attention_prefill"]}
    ops["both"] = ops["decode"] + ops["prefill"]
    if op not in ops:
        raise ConfigError(f"--op {op!r} is not known; known: {', '.join(ops)}")
    if seq_lens is not None and (batch is not None or ctx is not None or op == "prefill"):
        raise ConfigError("--seq-lens is of one decode: leave out --batch, --ctx and --op prefill")
    cells = attention_cells(
        ops[op],
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dims=numbers("--head-dim", head_dim),
        block_sizes=numbers("--block-size", block_size),
        batches=None if batch is None else numbers("--batch", batch),
        ctxs=None if ctx is None else numbers("--ctx", ctx),
        mixed=() if seq_lens is None else _lengths(seq_lens),
        on_cpu=device == "cpu",
    )
    if plot is not None:
        check_can_plot(plot, has_decodes=op != "prefill")
    names = options.listed(backend)
    return run_cells(cells, names, device, plugins, json_file=json_file, plot=plot)


@app.command(short_help="Measure the other ops, backends side by side.")
def ops(
    *,
    backend: Backends = None,
    op: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help="Only this op; several with commas or given again."),
    ] = None,
    dtype: Dtype = "bfloat16",
    rows: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Rows. Default: 1, 8, 64 and 256; linear: 1, 2, 4 and 8."
        ),
    ] = None,
    mb: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Megabytes of an elementwise op's large cell; 0: none. Default: 256."
        ),
    ] = None,
    json_file: JsonFile = None,
    device: Device = "cuda",
    plugins: options.Plugins = None,
    debug: options.Debug = False,
) -> int:
    """Measure every op but attention, in the shape of Llama-3.2-1B, as `attention` does."""
    from tvr.bench.op_cells import OPS, op_cells

    asked = options.listed(op) or OPS
    if unknown := [name for name in asked if name not in OPS]:
        raise ConfigError(f"--op {unknown[0]!r} is not known here; known: {', '.join(OPS)}")
    if mb is not None and mb < 0:
        raise ConfigError(f"--mb is {mb}; it must be at least 0")
    cells = op_cells(
        asked,
        dtype=dtype,
        rows=None if rows is None else numbers("--rows", rows),
        megabytes=mb,
        on_cpu=device == "cpu",
    )
    return run_cells(cells, options.listed(backend), device, plugins, json_file=json_file)


app.command(short_help="Measure a model: time to the first token, and between tokens.")(latency)
app.command(short_help="Measure a model: many requests at once.")(throughput)
app.command(short_help="Measure a server of any make under load.")(serve)
app.command(short_help="Compare two results, as before and after a change.")(compare)


def _lengths(text: str) -> tuple[int, ...]:
    """Return the lengths of "100000,63x512"."""
    lengths: list[int] = []
    for part in text.split(","):
        count, _, length = part.rpartition("x")
        if not (length.isdecimal() and int(length) and (count or "1").strip("0").isdecimal()):
            raise ConfigError(
                f"--seq-lens {text!r}: {part!r} is no length nor CxN, as in 100000,63x512"
            )
        lengths += [int(length)] * int(count or 1)
    return tuple(lengths)
