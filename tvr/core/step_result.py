"""What a step gave: as tensors where the model is, then as plain values on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvr.core.logprobs import LogprobTensors, RawLogprobs
from tvr.core.schedule_output import ScheduleOutput

if TYPE_CHECKING:
    from tvr.core.step_extras import PromptRows

#: The error of a sequence for which no token could be chosen.
NO_TOKEN = "the logits hold NaN or allow no token"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step's results on the host.

    Attributes:
        tokens: one for each sampling entry; -1: no valid logit.
        logprobs: one for each sampling entry that wants them; None: none does.
        errors: by sequence id, why there is no token, where that is known.
        prompts: log-probabilities of stretches of prompts.
    """

    tokens: list[int]
    logprobs: list[RawLogprobs | None] | None = None
    errors: dict[str, str] = field(default_factory=dict)
    prompts: list[tuple[PromptRows, list[RawLogprobs]]] = field(default_factory=list)

    def token_errors(self, output: ScheduleOutput) -> list[str | None] | None:
        """Return for each token of the step `output` why it is none; None: there are all."""
        if min(self.tokens, default=0) >= 0:
            return None
        ids = (e.request_id for e in output.entries if e.samples)
        return [
            None if token >= 0 else self.errors.get(request_id, NO_TOKEN)
            for request_id, token in zip(ids, self.tokens, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """A step's results on its device.

    Attributes:
        tokens: [R] int64.
        errors: see `StepResult`.
        places: of each row of `logprobs` the sampling entry, and how many of the likeliest tokens
            it wants; None: it wants no log-probabilities.
        logprobs: of all sampling entries, or of those that want them.
        prompts: stretches of prompts whose rows follow each other in `prompt_logprobs`.
        prompt_logprobs: of all these.
    """

    tokens: Tensor
    errors: dict[str, str] = field(default_factory=dict)
    places: Sequence[tuple[int, int | None]] = ()
    logprobs: LogprobTensors | None = None
    prompts: Sequence[PromptRows] = ()
    prompt_logprobs: LogprobTensors | None = None

    def to_pinned(self) -> DeviceResult:
        """Start copying every tensor to the host, on the current stream."""

        return replace(
            self,
            tokens=_to_pinned(self.tokens),
            logprobs=self.logprobs and self.logprobs.to_pinned(),
            prompt_logprobs=self.prompt_logprobs and self.prompt_logprobs.to_pinned(),
        )

    def on_host(self) -> StepResult:
        """Return plain values, of tensors that have arrived on the host."""
        tokens = self.tokens.tolist()
        logprobs: list[RawLogprobs | None] | None = None
        if self.logprobs is not None:
            logprobs = [None] * len(tokens)
            rows = self.logprobs.on_host(num_top or 0 for _, num_top in self.places)
            for (place, num_top), row in zip(self.places, rows, strict=True):
                if num_top is not None:
                    logprobs[place] = row
        prompts = []
        if self.prompt_logprobs is not None:
            num_tops = (p.num_top for p in self.prompts for _ in p.targets)
            left = iter(self.prompt_logprobs.on_host(num_tops))
            prompts = [(p, list(islice(left, len(p.targets)))) for p in self.prompts]
        return StepResult(tokens=tokens, logprobs=logprobs, errors=self.errors, prompts=prompts)


def _to_pinned(tensor: Tensor) -> Tensor:
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
