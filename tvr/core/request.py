"""A user's request as the engine sees it: its sequences and the text made of their tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tvr.core.detokenizer import IncrementalDetokenizer
from tvr.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tvr.core.sampling_params import SamplingParams
from tvr.core.scheduler import SequenceUpdate
from tvr.core.sequence import Sequence
from tvr.core.stop import StopMatcher, resolve_stops
from tvr.core.tokenizer import Tokenizer


@dataclass(kw_only=True, slots=True)
class Completion:
    """One of a request's n answers: a sequence and what turns its tokens into text."""

    sequence: Sequence
    seed: int
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    stops: StopMatcher


class Request:
    """A request from its admission to its last output.

    `output` is one object that grows from step to step.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seeds: list[int],
        max_tokens: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Build the request's sequences.

        Args:
            request_id: the user's id.
            prompt: the prompt's text, if it was given as text.
            prompt_token_ids: the prompt.
            params: how to sample.
            seeds: one for each of the `params.n` answers.
            max_tokens: most new tokens, already limited by the context.
            tokenizer: None: outputs carry token ids only.
        """
        self.request_id = request_id
        self.params = params
        strings = list(params.stop)
        stop_ids = set(params.stop_token_ids)
        eos_ids: frozenset[int] = frozenset()
        if tokenizer is not None:
            strings, special_ids = resolve_stops(tokenizer, strings)
            stop_ids |= set(special_ids)
            eos_ids = tokenizer.eos_token_ids
        #: Ids that end a sequence without being named by the user: no stop_reason.
        self._silent_stop_ids = frozenset() if params.ignore_eos else eos_ids - stop_ids
        self.completions: list[Completion] = []
        for index in range(params.n):
            sequence = Sequence(
                request_id if params.n == 1 else f"{request_id}[{index}]",
                prompt_token_ids,
                max_tokens=max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=frozenset(stop_ids) | self._silent_stop_ids,
                parent_id=None if index == 0 else self.completions[0].sequence.request_id,
            )
            detokenizer = None
            if tokenizer is not None:
                detokenizer = IncrementalDetokenizer(
                    tokenizer, skip_special_tokens=params.skip_special_tokens
                )
            self.completions.append(
                Completion(
                    sequence=sequence,
                    seed=seeds[index],
                    output=CompletionOutput(index=index),
                    detokenizer=detokenizer,
                    stops=StopMatcher(strings, params.include_stop_str_in_output),
                )
            )
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[c.output for c in self.completions],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )

    def apply(self, completion: Completion, update: SequenceUpdate) -> str | None:
        """Add a step's result to the outputs.

        Returns:
            "stop" where a stop string ended the sequence and the scheduler must be told, else None.

        Mutates: `output`.
        """
        out = completion.output
        if out.finish_reason is not None:  # a stop string ended it while this step was in flight
            return None
        metrics = self.output.metrics
        token, reason = update.token, update.finish_reason
        stopped: str | None = None
        if token is not None:
            now = time.monotonic()
            if metrics.first_token_time is None:
                metrics.first_token_time = now
                self.output.num_cached_tokens = completion.sequence.num_cached_tokens
            out.token_ids.append(token)
            by_token = reason == "stop"
            if by_token and token not in self._silent_stop_ids:
                out.stop_reason = token
            if completion.detokenizer is not None and (
                not by_token or self.params.include_stop_str_in_output
            ):
                text, stopped = completion.stops.push(completion.detokenizer.push(token))
                out.text += text
        if stopped is not None:
            out.stop_reason = stopped
            self._finish(completion, "stop")
            # The scheduler may have ended it by the same token.
            return "stop" if reason is None else None
        if reason is not None:
            if completion.detokenizer is not None:
                text, stopped = completion.stops.push(completion.detokenizer.flush())
                out.text += text if stopped is not None else text + completion.stops.flush()
            out.error = update.error
            self._finish(completion, reason)
        return None

    def _finish(self, completion: Completion, reason: str) -> None:
        completion.output.finish_reason = reason
        if all(c.output.finish_reason is not None for c in self.completions):
            self.output.finished = True
            self.output.metrics.finished_time = time.monotonic()

    def abort(self) -> None:
        """Mark every unfinished answer as aborted. Mutates: `output`."""
        for completion in self.completions:
            if completion.output.finish_reason is None:
                if completion.detokenizer is not None:
                    completion.output.text += completion.stops.flush()
                self._finish(completion, "abort")
