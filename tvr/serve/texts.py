"""Clients' texts made into tokens, and their lengths checked before that. Runs in any thread."""

from __future__ import annotations

from typing import Any

from tvr.core.prompt import prompt_token_ids
from tvr.core.tokenizer import Tokenizer
from tvr.errors import RequestError
from tvr.serve.errors import bad_request
from tvr.serve.messages import text_length
from tvr.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

#: Variables of a template that are not the client's; `self` is how templates name themselves.
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "self"})


class Texts:
    """One model's tokenizer and context. Can be pickled.

    Args:
        tokenizer: the model's.
        max_model_len: its context, in tokens.
        vocab_size: of the model; more than the tokenizer's perhaps.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        # A text that is longer than so many of the longest token need not be encoded, which would
        # take seconds for some megabytes.
        self._most_chars = self.tokenizer.longest_token * self.max_model_len

    def prompts_of(self, request: CompletionRequest) -> list[list[int]]:
        """Return each prompt's tokens.

        Raises:
            ApiError, RequestError: one of them cannot be served.
        """
        special = request.add_special_tokens is not False
        found = [
            self._encode(prompt, special) if isinstance(prompt, str) else prompt
            for prompt in request.prompt
        ]
        for token_ids in found:
            self._check_room(token_ids)
            prompt_token_ids(token_ids, None, self._vocab_size)
        return found

    def conversation_of(self, request: ChatRequest) -> list[int]:
        """Return a conversation's tokens; raises as `prompts_of`."""
        token_ids = self._lay_out(request)
        self._check_room(token_ids)
        return token_ids

    def text_of(self, prompt: str | list[int]) -> str:
        """Return a prompt's text."""
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode(prompt, skip_special_tokens=False)

    def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Answer `/tokenize`; raises as `prompts_of`, but a text may be longer than the context."""
        request.check()
        if request.messages is not None:
            token_ids = self._lay_out(request)
        else:
            special = request.add_special_tokens is not False
            token_ids = self.tokenizer.encode(request.prompt or "", add_special_tokens=special)
        answer = {
            "count": len(token_ids),
            "max_model_len": self.max_model_len,
            "tokens": token_ids,
        }
        if request.return_token_strs:
            found = [self.tokenizer.token_bytes(i).decode(errors="replace") for i in token_ids]
            answer["token_strs"] = found
        return answer

    def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Answer `/detokenize`."""
        largest = max(request.tokens, default=0)
        if largest >= self._vocab_size:
            raise RequestError(
                f"tokens holds {largest}; the model's token ids are 0 to {self._vocab_size - 1}"
            )
        return {"prompt": self.tokenizer.decode(request.tokens, skip_special_tokens=False)}

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self._check_length(len(text))
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise bad_request(
                "the prompt is empty and the tokenizer adds no BOS token; give some text",
                param="prompt",
            )
        return token_ids

    def _lay_out(self, request: ChatRequest | TokenizeRequest) -> list[int]:
        messages = request.messages or []
        self._check_length(text_length(messages))
        kwargs = request.chat_template_kwargs or {}
        if taken := sorted(_RESERVED & kwargs.keys()):
            raise bad_request(
                f"chat_template_kwargs has {taken[0]!r}, which is not for it; leave it out",
                param="chat_template_kwargs",
            )
        opens = request.add_generation_prompt is not False
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=opens, **kwargs)

    def _check_length(self, num_chars: int) -> None:
        if num_chars > self._most_chars:
            least = -(-num_chars // self.tokenizer.longest_token)
            raise self._too_long(f"{num_chars} characters, which are at least {least} tokens")

    def _check_room(self, token_ids: list[int]) -> None:
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens")

    def _too_long(self, length: str) -> Exception:
        return bad_request(
            f"the prompt has {length}; this model's context is {self.max_model_len} tokens, of "
            "which one must be left for the answer: send a shorter prompt",
            code="context_length_exceeded",
        )
