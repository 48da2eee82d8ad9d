"""`tvr run`: a prompt goes in, text streams out; or a file of prompts, and a file of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tvr.cli import options
from tvr.cli.output import text_writer
from tvr.cli.shadow import open_shadow, shadowed
from tvr.errors import ConfigError, OpFault


def run(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Text to continue or answer; '-' reads stdin; none: a dialogue.",
        ),
    ] = None,
    *,
    model: options.Model = options.DEMO,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="Prompts instead of PROMPT: one a line, or a .jsonl; '-': stdin.",
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Write results to this file; '-' or none: stdout."
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Results are JSON, a line each; such a file is resumed."),
    ] = False,
    backend: options.Backend = "auto",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Lay the prompt out by the model's chat template. Default: if it has one.",
        ),
    ] = None,
    system: options.System = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    load_format: options.LoadFormat = "auto",
    plugins: options.Plugins = None,
    strict: options.Strict = False,
    enforce_eager: options.EnforceEager = False,
    batch_invariant: options.BatchInvariant = False,
    stats: options.Stats = False,
    shadow: options.Shadow = None,
    shadow_file: options.ShadowFile = None,
    debug: options.Debug = False,
) -> int:
    """Continue a text or answer a question, streaming to stdout as it comes.

    With --input, run a file of prompts as one batch; --json writes a result a line, and a run
    that was stopped goes on where it was. With --shadow, find the first op that goes wrong.
    """
    from tvr.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature_for(model, temperature),
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    engine: options.EngineOptions = {
        "backend": backend,
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "load_format": load_format,
        "plugins": plugins,
        "strict": strict,
        "enforce_eager": enforce_eager,
        "batch_invariant": batch_invariant,
    }
    watcher = open_shadow(shadow, shadow_file, backend=backend, plugins=plugins)
    is_batch = input_file is not None or output_file is not None or as_json
    if input_file is not None and prompt is not None:
        raise ConfigError("PROMPT and --input were both given; give one of them")
    if input_file is None:
        prompt = _checked_prompt(prompt)
        if prompt is None and is_batch:
            raise ConfigError("--json and --output need a PROMPT or --input")
        if prompt is None and watcher is not None:
            raise ConfigError("--shadow needs a PROMPT or --input; it stops at the first fault")
    if is_batch:
        if stats:
            raise ConfigError("--stats is of one answer; use it without --input, --output, --json")
        from tvr.cli.batch import run_batch
        from tvr.cli.batch_input import BatchOptions, read_lines

        lines = [(1, (prompt or "").encode())] if input_file is None else read_lines(input_file)
        _check_not_same(input_file, output_file)
        jsonl = input_file is not None and input_file.suffix == ".jsonl"
        with shadowed(watcher, backend):
            return run_batch(
                BatchOptions(params=params, model=model, chat=chat, system=system, jsonl=jsonl),
                lines,
                output_file,
                as_json=as_json,
                open_llm=lambda: options.open_llm(
                    model, needs_tokenizer=not jsonl, shadow=watcher, **engine
                ),
            )

    from tvr.cli.chat import converse
    from tvr.cli.conversation import Conversation

    with shadowed(watcher, backend), options.open_llm(model, shadow=watcher, **engine) as llm:
        has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        use_chat = has_template if chat is None else chat
        conversation = Conversation(llm, params, chat=use_chat, system=system)
        if prompt is None:
            converse(conversation, stats=stats)
            return 0
        write = text_writer()
        try:
            conversation.answer(prompt, write)
        except OpFault:
            write("\n")  # whatever had come of the answer ends here
            raise
        if stats and conversation.last is not None:
            from tvr.cli.stats import print_stats

            print_stats(llm, conversation.last, conversation.most_blocks)
    return 0


def _checked_prompt(prompt: str | None) -> str | None:
    """Return the prompt, read from stdin if it is "-"; None: there is a terminal to ask at."""
    if prompt is None:
        if sys.stdin is not None and sys.stdin.isatty():
            return None
        raise ConfigError("no PROMPT was given; write it in quotes, or '-' to read it from stdin")
    if prompt == "-" and sys.stdin is None:
        raise ConfigError("'-' reads the prompt from stdin, which is closed")
    try:
        prompt = sys.stdin.read() if prompt == "-" else prompt
        prompt.encode()  # Python lets bytes that are no text through as lone surrogates
    except UnicodeError as e:
        raise ConfigError(f"the prompt is not text: {e}; send UTF-8") from e
    return prompt


def _check_not_same(input_file: Path | None, output_file: Path | None) -> None:
    if input_file is None or output_file is None or not output_file.exists():
        return
    if input_file.exists() and input_file.samefile(output_file):
        raise ConfigError(f"--input and --output are both {input_file}; name another output")
