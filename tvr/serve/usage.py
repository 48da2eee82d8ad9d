"""How many tokens a request has used."""

from __future__ import annotations

from typing import Any

from tvr.serve.deltas import Delivery


class Usage:
    """Counts the tokens of one client's request: its prompts once, whatever n is."""

    def __init__(self) -> None:
        self._begun: set[int] = set()  # prompts
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0

    def add(self, delivery: Delivery) -> None:
        """Count what a step brought."""
        if delivery.prompt not in self._begun:
            self._begun.add(delivery.prompt)
            self._prompt_tokens += len(delivery.output.prompt_token_ids)
            self._cached_tokens += delivery.output.num_cached_tokens
        self._completion_tokens += sum(len(delta.token_ids) for delta in delivery.deltas)

    @property
    def counts(self) -> dict[str, Any]:
        """The counts so far, as clients read them."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
