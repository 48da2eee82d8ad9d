"""A conversation with a model: its history, and answers that stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvr.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from tvr.core.llm import LLM
    from tvr.core.outputs import RequestOutput
    from tvr.core.prompt import Prompt
    from tvr.core.sampling_params import SamplingParams

Message = dict[str, Any]

NO_SYSTEM = "--system needs a chat; use it with --chat and a model with a template"


class Conversation:
    """A chat that grows, or, without `chat`, texts that know nothing of each other.

    Attributes:
        llm: the engine.
        params: of the next answer.
        chat: whether turns are laid out by the model's chat template.
        messages: the turns so far, a system message first if there is one.
        last: the newest answer's output; None: there is none yet.
        most_blocks: KV blocks in use at that answer's fullest moment.
    """

    def __init__(self, llm: LLM, params: SamplingParams, *, chat: bool, system: str | None) -> None:
        if system is not None and not chat:
            raise ConfigError(NO_SYSTEM)
        self.llm = llm
        self.params = params
        self.chat = chat
        self.messages: list[Message] = []
        self.last: RequestOutput | None = None
        self.most_blocks = 0
        self.set_system(system)

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def set_system(self, text: str | None) -> None:
        """Put `text` in place of the system message; None: have none."""
        if self.system is not None:
            del self.messages[0]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    def answer(self, text: str, write: Callable[[str], None]) -> None:
        """Write the answer to `text` as it comes, and a line's end.

        The turn enters the history when its answer is over; one that was interrupted, with what
        had come of the answer. A turn that fails leaves the history as it was.

        Raises:
            RequestError: the prompt cannot be served.
            KernelError: the answer ended with an error.
            KeyboardInterrupt: after the engine has let go of the request.
        """
        turn: Message = {"role": "user", "content": text}
        prompt: Prompt = self.llm.chat_prompt([*self.messages, turn]) if self.chat else text
        printed, most_blocks = "", 0
        stream = self.llm.stream(prompt, self.params)
        try:
            for output in stream:
                piece = output.outputs[0].text[len(printed) :]
                printed += piece  # first, for an interrupt may come as soon as it is seen
                write(piece)
                most_blocks = max(most_blocks, self.llm.stats()["num_used_blocks"])
        except KeyboardInterrupt:
            write("\n")
            if printed:
                self._remember(turn, printed)
            raise
        finally:
            stream.close()
        write("\n")
        if output.outputs[0].finish_reason == "error":
            raise KernelError(output.outputs[0].error or "the request failed")
        self.last, self.most_blocks = output, most_blocks
        self._remember(turn, printed)

    def _remember(self, turn: Message, answer: str) -> None:
        self.messages += [turn, {"role": "assistant", "content": answer}]

    def take_back(self) -> str | None:
        """Remove the last turn and its answer; return what was asked. None: there is none."""
        roles = [message["role"] for message in self.messages]
        if "user" not in roles:
            return None
        index = len(roles) - 1 - roles[::-1].index("user")
        asked: str = self.messages[index]["content"]
        del self.messages[index:]
        return asked
