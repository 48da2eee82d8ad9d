"""What answers look like on the wire, whole and in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from tvr.core.outputs import Logprob, RequestOutput
from tvr.core.tokenizer import Tokenizer
from tvr.serve.deltas import Delivery, Delta

Logprobs = Sequence["dict[int, Logprob] | None"]


class Shape(Protocol):
    """One of the two endpoints' forms of an answer. Made for one request."""

    #: Fields of a whole answer and of each piece of one, beside "choices".
    whole_head: dict[str, Any]
    piece_head: dict[str, Any]

    def whole(self, delivery: Delivery) -> list[dict[str, Any]]:
        """Return the choices of one prompt's answers, which are complete."""

    def pieces(self, delivery: Delivery) -> list[dict[str, Any]]:
        """Return what a step has added to them, a choice for each answer."""


def heads(kind: str, piece_kind: str, job_id: str, model: str) -> tuple[dict[str, Any], ...]:
    """Return the two heads of a shape."""
    head = {"id": job_id, "created": int(time.time()), "model": model}
    return {**head, "object": kind}, {**head, "object": piece_kind}


class CompletionShape:
    """`/v1/completions`.

    Args:
        job_id, model: see there.
        tokenizer: names tokens.
        echoes: by prompt, the text to begin each answer with; None: none.
        logprobs: whether they were asked for.
    """

    def __init__(
        self,
        job_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        echoes: list[str] | None,
        logprobs: bool,
    ) -> None:
        kinds = ("text_completion", "text_completion")
        self.whole_head, self.piece_head = heads(*kinds, job_id, model)
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}  # by answer, characters of the tokens so far

    def whole(self, delivery: Delivery) -> list[dict[str, Any]]:
        """See `Shape`."""
        return self.pieces(delivery)

    def pieces(self, delivery: Delivery) -> list[dict[str, Any]]:
        """See `Shape`."""
        return [self._piece(delivery, delta) for delta in delivery.deltas]

    def _piece(self, delivery: Delivery, delta: Delta) -> dict[str, Any]:
        text, tokens = delta.text, delta.token_ids
        entries: Logprobs = delta.logprobs or ()
        if self._echoes is not None and delta.answer not in self._offsets:
            text = self._echoes[delivery.prompt] + text
            tokens, entries = _with_prompt(delivery.output, tokens, entries)
        self._offsets.setdefault(delta.answer, 0)
        return {
            "index": delta.answer,
            "text": text,
            "logprobs": self._named(delta.answer, tokens, entries) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _named(self, index: int, tokens: list[int], entries: Logprobs) -> dict[str, Any]:
        texts, own, top, offsets = [], [], [], []
        # Tokens of an answer that failed may be more than their log-probabilities.
        for token, entry in zip(tokens, entries, strict=False):
            text = _text(self._tokenizer, token)
            texts.append(text)
            own.append(None if entry is None else entry[token].logprob)
            top.append(None if entry is None else _by_text(entry))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": own,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _with_prompt(
    output: RequestOutput, tokens: list[int], entries: Logprobs
) -> tuple[list[int], Logprobs]:
    """Return the prompt's tokens and log-probabilities before those of an answer."""
    return output.prompt_token_ids + tokens, [*(output.prompt_logprobs or ()), *entries]


def _by_text(entry: dict[int, Logprob]) -> dict[str, float]:
    found: dict[str, float] = {}
    for logprob in entry.values():  # of tokens with one text, the likelier one
        found.setdefault(logprob.decoded_token or "", logprob.logprob)
    return found


class ChatShape:
    """`/v1/chat/completions`.

    Args:
        job_id, model: see there.
        tokenizer: knows the bytes of tokens.
        num_top: likeliest tokens asked for; None: no log-probabilities.
    """

    def __init__(self, job_id: str, model: str, tokenizer: Tokenizer, num_top: int | None) -> None:
        kinds = ("chat.completion", "chat.completion.chunk")
        self.whole_head, self.piece_head = heads(*kinds, job_id, model)
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._begun: set[int] = set()

    def whole(self, delivery: Delivery) -> list[dict[str, Any]]:
        """See `Shape`."""
        return [
            {
                "index": delta.answer,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                **self._rest(delta),
            }
            for delta in delivery.deltas
        ]

    def pieces(self, delivery: Delivery) -> list[dict[str, Any]]:
        """See `Shape`."""
        choices = []
        for delta in delivery.deltas:
            said = {"content": delta.text}
            if delta.answer not in self._begun:
                self._begun.add(delta.answer)
                said = {"role": "assistant", **said}
            choices.append({"index": delta.answer, "delta": said, **self._rest(delta)})
        return choices

    def _rest(self, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self._num_top is not None:
            named = [
                self._named(token, entry)
                for token, entry in zip(delta.token_ids, delta.logprobs or (), strict=False)
            ]
            logprobs = {"content": named, "refusal": None}
        return {
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _named(self, token: int, entry: dict[int, Logprob]) -> dict[str, Any]:
        top = [(i, lp) for i, lp in entry.items() if lp.rank <= (self._num_top or 0)]
        top.sort(key=lambda item: item[1].rank)
        likeliest = [self._one(i, lp) for i, lp in top]
        return {**self._one(token, entry[token]), "top_logprobs": likeliest}

    def _one(self, token: int, logprob: Logprob) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": _text(self._tokenizer, token),
            "logprob": logprob.logprob,
            "bytes": list(data),
        }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode(errors="replace")
