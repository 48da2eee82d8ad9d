"""`tvr chat`: a conversation at the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from tvr.cli import options
from tvr.cli.output import remark, text_writer
from tvr.errors import ConfigError, TvrError

if TYPE_CHECKING:
    from tvr.cli.conversation import Conversation, Message


def chat(
    *,
    model: options.Model = options.DEMO,
    backend: options.Backend = "auto",
    max_tokens: options.MaxTokens = 1024,
    temperature: options.Temperature = None,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
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
    debug: options.Debug = False,
) -> None:
    """Talk with a model that remembers the conversation; /help lists what else it takes."""
    from tvr.cli.conversation import Conversation
    from tvr.core.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature_for(model, temperature),
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
    )
    with options.open_llm(
        model,
        backend=backend,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        load_format=load_format,
        plugins=plugins,
        strict=strict,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
    ) as llm:
        has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        conversation = Conversation(llm, params, chat=has_template, system=system)
        if not has_template:
            remark("the model has no chat template, so it continues each text and remembers none")
        converse(conversation, stats=stats)


def converse(conversation: Conversation, *, stats: bool) -> None:
    """Read messages and write answers until the end of stdin or /exit.

    Nothing that goes wrong with one message ends the chat, nor does Ctrl-C. A stdin that cannot
    be read or a stdout that cannot be written does.
    """
    from tvr.cli.commands import run_command
    from tvr.cli.stats import print_stats

    if sys.stdin is None:
        raise ConfigError("stdin is closed; there is nobody to talk with")
    write = text_writer()
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # not there on Windows; input() then has no history
            import readline  # noqa: F401
        remark("/help lists the commands, Ctrl-D ends")
    while True:
        before = list(conversation.messages)
        try:
            text: str | None = _read_message(interactive)
            if text is not None and text.startswith("//"):
                text = text[1:]
            elif text is not None and text.startswith("/"):
                text = run_command(conversation, text)
            if text is None or not text.strip():
                continue
            conversation.answer(text, write)
            if stats and conversation.last is not None:
                print_stats(conversation.llm, conversation.last, conversation.most_blocks)
        except EOFError:
            if interactive:
                write("\n")
            return
        except KeyboardInterrupt:
            _give_back(conversation, before)
            remark("stopped; Ctrl-D or /exit ends the chat")
        except (TvrError, UnicodeError) as error:
            _give_back(conversation, before)
            remark(f"error: {error}")


def _give_back(conversation: Conversation, before: list[Message]) -> None:
    """Restore a turn that /retry took back and that got no other answer."""
    if len(conversation.messages) < len(before):
        conversation.messages[:] = before


def _read_message(interactive: bool) -> str:
    r"""Return the next message: one line, or several where each but the last ends with "\"."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if interactive else "")
        except EOFError:
            if not lines:
                raise
            break
        line.encode()  # bytes that are no text come through as lone surrogates
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            break
    return "\n".join(lines)
