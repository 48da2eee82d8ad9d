"""How many tokens a request has used."""

from __future__ import annotations

from typing import Any

from tvr.serve.deltas import Delivery
from tvr.serve.job import Job


class Usage:
    """Counts the tokens of one client's request."""

    def __init__(self) -> None:
        self._completion_tokens = 0

    def add(self, delivery: Delivery) -> None:
        """Count what a step brought."""
        self._completion_tokens += sum(len(delta.token_ids) for delta in delivery.deltas)

    def of(self, job: Job) -> dict[str, Any]:
        """Return the counts as clients read them; prompts count once, whatever n is."""
        outputs = job.outputs.values()
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": num_prompt + self._completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens for output in outputs)
            },
        }
