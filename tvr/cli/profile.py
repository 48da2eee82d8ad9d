"""`tvr profile`: a trace of some steps, with the phases of a step and its ops by name."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from tvr.cli import options
from tvr.cli.bench_model import open_model
from tvr.cli.bench_options import refuse_too_many, whole
from tvr.cli.bench_run import check_picture, command_line
from tvr.cli.output import check_can_write, columns, remark, text_writer
from tvr.errors import ConfigError


def profile(
    *,
    model: options.Model = options.DEMO,
    backend: options.Backend = "auto",
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to trace, from the first.")] = 8,
    batch: Annotated[int, typer.Option(metavar="N", help="Requests at once.")] = 1,
    input_len: Annotated[int, typer.Option(metavar="N", help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(metavar="N", help="Tokens of an answer.")] = 128,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.json", help="Where the trace goes.")
    ] = Path("trace.json"),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the steps as a timeline.")
    ] = None,
    enforce_eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager/--graphs",
            help="Launch steps op by op, each op by name; or as served: CUDA graphs hide the ops.",
        ),
    ] = True,
    batch_invariant: options.BatchInvariant = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    load_format: options.LoadFormat = "auto",
    plugins: options.Plugins = None,
    debug: options.Debug = False,
) -> int:
    """Write a Chrome trace of some steps, for ui.perfetto.dev, and print where the time goes.

    On a GPU it also prints the share of the time in which the device was idle: of all steps, and
    of those of decodes only, from the first kernel of such steps in a row to the last. A profiler
    costs the host time, and so the device is idle for longer; `tvr bench latency` says how idle
    it is without one.
    """
    for name, value in (
        ("--steps", steps),
        ("--batch", batch),
        ("--input-len", input_len),
        ("--output-len", output_len),
    ):
        whole(name, value, 1)
    if output.suffix != ".json":
        raise ConfigError(f"--output {output}: the name must end in .json")
    check_can_write({"--output": output, "--plot": plot})
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
        from tvr.bench.engine_profile import load_for_profile, profile_steps
        from tvr.bench.trace import read_trace
        from tvr.bench.trace_table import trace_rows
        from tvr.bench.workload import random_prompts
        from tvr.core.phases import HOST_PHASES, STEP_PHASES

        need = input_len + output_len
        opened.refuse_longer(f"--input-len {input_len} with --output-len {output_len}", need)
        refuse_too_many(batch, input_len)
        names = opened.backends(None if backend == "auto" else (backend,))
        sizes = {"batch": batch, "input_len": input_len, "output_len": output_len}
        header = opened.header(command_line(), names, sizes) | opened.fields
        options.allow_interrupts()
        with load_for_profile(
            opened, backend, context=opened.max_model_len or need, num_seqs=batch
        ) as llm:
            done = profile_steps(
                llm,
                output,
                prompts=random_prompts(batch, input_len, opened.config.vocab_size, 0),
                output_len=output_len,
                num_steps=steps,
                header=header,
            )
    if done < steps:
        remark(f"the requests ended after {done} steps; a longer --output-len has more")
    trace = read_trace(output)
    rows = trace_rows(trace, [*HOST_PHASES, "step", *STEP_PHASES])
    facts = [f"{done} steps of {batch} x {input_len} + {output_len}"]
    facts += [] if trace.idle is None else [f"device idle {trace.idle:.1%}"]
    facts += [] if trace.decode_idle is None else [f"of decode steps {trace.decode_idle:.1%}"]
    heading = f"{', '.join(facts)}: {output}"
    table = columns(rows, right=range(1, len(rows[0])))
    text_writer()("\n".join([heading, "", *table]) + "\n")
    if plot is not None:
        from tvr.bench.plot_timeline import plot_timeline

        plot_timeline(plot, trace, HOST_PHASES, STEP_PHASES)
    return 0
