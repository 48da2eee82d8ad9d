"""`tvr run`: a prompt goes in, text streams out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tvr.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from tvr.core.llm import LLM
    from tvr.core.outputs import RequestOutput
    from tvr.core.sampling_params import SamplingParams


def run(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Text to continue or answer; '-' reads stdin; none: a dialogue.",
        ),
    ] = None,
    *,
    model: Annotated[
        str,
        typer.Option(metavar="PATH", help="A Hugging Face checkpoint directory or a .gguf file."),
    ],
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Backend put first; auto: the configured order.")
    ] = "auto",
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.")] = 256,
    temperature: Annotated[
        float,
        typer.Option(metavar="X", help="0: always the likeliest token; 1: as the model says."),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(metavar="X", help="Sample from this much of the probability.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(metavar="N", help="Sample from this many tokens; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds draw equal tokens.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text; may be given again."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Lay the prompt out by the model's chat template. Default: if it has one.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of a chat.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of prompt and answer together.")
    ] = None,
    load_format: Annotated[
        str,
        typer.Option(metavar="NAME", help="auto, safetensors, gguf, or dummy: random weights."),
    ] = "auto",
    plugins: Annotated[
        str | None, typer.Option(metavar="FILE", help="A plugins.toml to use.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse ops served by another than --backend.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print times, KV use and who served each op.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Continue a text or answer a question, streaming to stdout as it comes."""
    from tvr.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    prompt = _checked_prompt(prompt)

    from tvr.core.checkpoint_source import open_checkpoint
    from tvr.core.llm import LLM
    from tvr.core.plugin_config import find_config

    open_checkpoint(model, load_format).require_tokenizer()  # before the weights are read
    llm = LLM(
        model,
        backend=backend,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        load_format=load_format,
        plugins=find_config(plugins, os.environ),
        strict=strict,
    )
    for passed in llm.parts.ops.passed_over:
        if passed.backend == backend:
            reasons = "; ".join(passed.reasons)
            print(f"tvr: {backend} does not serve {passed.op}: {reasons}", file=sys.stderr)
    has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    use_chat = has_template if chat is None else chat
    if system is not None and not use_chat:
        raise ConfigError("--system needs a chat; use it with --chat and a model with a template")
    dialogue = _Dialogue(llm, params, chat=use_chat, system=system)
    try:
        if prompt is not None:
            _answer(dialogue, prompt, stats)
            return
        while (line := _read_line()) is not None:
            if line.strip():
                _answer(dialogue, line, stats)
    finally:
        llm.close()


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


class _Dialogue:
    """A conversation that grows, or, without chat, prompts that know nothing of each other."""

    def __init__(self, llm: LLM, params: SamplingParams, *, chat: bool, system: str | None) -> None:
        self.llm = llm
        self._params = params
        self._chat = chat
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def stream(self, prompt: str) -> Iterator[RequestOutput]:
        if not self._chat:
            yield from self.llm.stream(prompt, self._params)
            return
        self._messages.append({"role": "user", "content": prompt})
        for output in self.llm.stream(self.llm.chat_prompt(self._messages), self._params):
            yield output
        self._messages.append({"role": "assistant", "content": output.outputs[0].text})


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        print()
        return None


def _answer(dialogue: _Dialogue, prompt: str, stats: bool) -> None:
    """Print the answer as it comes, then the statistics."""
    printed = 0
    most_blocks = 0
    write_text = _text_writer()
    try:
        for output in dialogue.stream(prompt):
            text = output.outputs[0].text
            write_text(text[printed:])
            printed = len(text)
            most_blocks = max(most_blocks, dialogue.llm.stats()["num_used_blocks"])
    except KeyboardInterrupt:
        write_text("\n")
        raise
    write_text("\n")
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise KernelError(completion.error or "the request failed")
    if stats:
        from tvr.cli.stats import print_stats

        print_stats(dialogue.llm, output, most_blocks)


def _text_writer() -> Callable[[str], None]:
    """Return a function that writes text at once, whatever stdout can encode."""
    if sys.stdout is None:
        raise ConfigError("stdout is closed; there is nowhere to write the answer")
    encoding = sys.stdout.encoding or "utf-8"

    def write(text: str) -> None:
        # A narrow terminal encoding must not end the answer: what it lacks becomes '?'.
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()

    return write
