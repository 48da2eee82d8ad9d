"""What some requests want of a step besides its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tvr.core.sampling_params import LogitsProcessor
from tvr.core.schedule_output import ScheduleOutput

if TYPE_CHECKING:
    from tvr.core.request import Completion, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """A stretch of prompt whose log-probabilities are wanted.

    Attributes:
        request: whose prompt it is.
        start: position of the first of `targets`.
        first_token: where in the step the token before it is.
        targets: the prompt's tokens there.
        num_top: how many of the likeliest tokens.
    """

    request: Request
    start: int
    first_token: int
    targets: list[int]
    num_top: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedRow:
    """A row of logits that goes through Python before a token is chosen.

    Attributes:
        sequence_id: whose it is.
        place: which of the step's sampling entries.
        processors: called in turn.
        output_token_ids: what was generated so far.
    """

    sequence_id: str
    place: int
    processors: Sequence[LogitsProcessor]
    output_token_ids: list[int]

    def apply(self, logits: Tensor) -> str | None:
        """Replace this row of `logits` [R, vocab]; return why it failed, if it did.

        A failed row becomes NaN, and no token is chosen from it. Mutates: `logits`.
        """
        row = logits[self.place]
        changed = row.float()
        if changed is row or changed.data_ptr() == row.data_ptr():
            changed = changed.clone()
        try:
            for processor in self.processors:
                changed = processor(self.output_token_ids, changed)
            if not isinstance(changed, Tensor) or changed.shape != row.shape:
                found = list(changed.shape) if isinstance(changed, Tensor) else type(changed)
                raise TypeError(f"it must return logits of shape {list(row.shape)}, not {found}")
            # A number past the dtype's largest stays one: infinity would be no logit.
            most = torch.finfo(row.dtype).max
            row.copy_(torch.where(changed.isinf(), changed, changed.clamp(-most, most)))
        except (Exception, SystemExit) as error:
            row.fill_(torch.nan)
            reason = " ".join(str(error).split())
            return f"a logits processor failed: {type(error).__name__}: {reason}"
        return None


@dataclass(frozen=True, slots=True)
class StepExtras:
    """Of one step; both lists in the order of its entries."""

    prompts: Sequence[PromptRows] = ()
    processed: Sequence[ProcessedRow] = ()


#: Of a step of which nothing but tokens is wanted.
NO_EXTRAS = StepExtras()


def extras_of(
    output: ScheduleOutput, completions: Mapping[str, tuple[Request, Completion]]
) -> StepExtras:
    """Return what the requests of a step want of it, by their parameters."""
    prompts: list[PromptRows] = []
    processed: list[ProcessedRow] = []
    first_token = place = 0
    for entry in output.entries:
        request, completion = completions[entry.request_id]
        params, sequence = request.params, completion.sequence
        num_rows = entry.logit_rows - entry.samples
        if num_rows and params.prompt_logprobs is not None:
            start = entry.start + 1
            prompts.append(
                PromptRows(
                    request=request,
                    start=start,
                    first_token=first_token,
                    targets=sequence.token_ids[start : start + num_rows],
                    num_top=params.prompt_logprobs,
                )
            )
        if entry.samples and params.logits_processors:
            processed.append(
                ProcessedRow(
                    sequence_id=entry.request_id,
                    place=place,
                    processors=params.logits_processors,
                    output_token_ids=sequence.output_token_ids,
                )
            )
        first_token += entry.num_tokens
        place += entry.samples
    return StepExtras(prompts, processed)
