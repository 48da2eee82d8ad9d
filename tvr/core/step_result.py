"""What a step gave: as tensors where the model is, then as plain values on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, repeat
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvr.core.logprobs import LogprobTensors, RawLogprobs
from tvr.core.schedule_output import Result, ScheduleOutput

if TYPE_CHECKING:
    from tvr.core.step_extras import PromptRows

#: Half the time of `Result(...)`, and needed once for every token there is.
_new_result = partial(tuple.__new__, Result)

_NO_TOKEN = "the logits hold NaN or allow no token"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """A step's results on its device.

    Attributes:
        tokens: [R] int64.
        errors: see `StepResult`.
        places: (sampling entry, number of likeliest tokens) of each row of `logprobs`.
        logprobs: of those sampling entries that want them.
        prompts: stretches of prompts whose rows follow each other in `prompt_logprobs`.
        prompt_logprobs: of all these.
    """

    tokens: Tensor
    errors: dict[str, str] = field(default_factory=dict)
    places: Sequence[tuple[int, int]] = ()
    logprobs: LogprobTensors | None = None
    prompts: Sequence[PromptRows] = ()
    prompt_logprobs: LogprobTensors | None = None

    def to_pinned(self) -> DeviceResult:
        """Start copying every tensor to the host, on the current stream."""

        def logprobs_to_pinned(given: LogprobTensors | None) -> LogprobTensors | None:
            if given is None:
                return None
            return LogprobTensors(
                _to_pinned(given.ids), _to_pinned(given.values), _to_pinned(given.ranks)
            )

        return replace(
            self,
            tokens=_to_pinned(self.tokens),
            logprobs=logprobs_to_pinned(self.logprobs),
            prompt_logprobs=logprobs_to_pinned(self.prompt_logprobs),
        )

    def on_host(self) -> StepResult:
        """Return plain values, of tensors that have arrived on the host."""
        tokens = self.tokens.tolist()
        logprobs: list[RawLogprobs | None] | None = None
        if self.logprobs is not None:
            logprobs = [None] * len(tokens)
            rows = self.logprobs.on_host([num_top for _, num_top in self.places])
            for (place, _), row in zip(self.places, rows, strict=True):
                logprobs[place] = row
        prompts = []
        if self.prompt_logprobs is not None:
            num_tops = [p.num_top for p in self.prompts for _ in p.targets]
            left = iter(self.prompt_logprobs.on_host(num_tops))
            prompts = [(p, [next(left) for _ in p.targets]) for p in self.prompts]
        return StepResult(tokens=tokens, logprobs=logprobs, errors=self.errors, prompts=prompts)


def results_of(
    output: ScheduleOutput,
    tokens: list[int],
    logprobs: Sequence[object] | None = None,
    errors: Mapping[str, str] | None = None,
) -> list[Result]:
    """Return a step's results for `update`; a token of -1 is none, and ends its sequence.

    Args:
        output: the step.
        tokens: one for each sampling entry.
        logprobs: the same, if any were asked for.
        errors: by sequence id, why there is no token, where that is known.
    """
    ids, epochs, _, _, _, samples, _, _ = zip(*output.entries, strict=True)
    columns = (compress(ids, samples), compress(epochs, samples), tokens)
    rows = zip(*columns, repeat(None), logprobs or repeat(None), strict=False)
    results = list(map(_new_result, rows))
    assert len(results) == len(tokens), "a step has as many tokens as entries that sample"
    if min(tokens, default=0) < 0:
        for i, (request_id, epoch, token, _, _) in enumerate(results):
            if token is not None and token < 0:
                error = (errors or {}).get(request_id, _NO_TOKEN)
                results[i] = Result(request_id, epoch, None, error)
    return results


def _to_pinned(tensor: Tensor) -> Tensor:
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
