"""A user's request as the engine sees it: its sequences and the text made of their tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tvr.core.detokenizer import IncrementalDetokenizer
from tvr.core.logprobs import LogprobSeries, RawLogprobs
from tvr.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tvr.core.sampling_params import SamplingParams
from tvr.core.schedule_output import SequenceUpdate
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
    stops: StopMatcher | None
    logprobs: LogprobSeries | None = None


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
        eos_token_ids: frozenset[int],
        bad_words: tuple[tuple[int, ...], ...] = (),
        followed: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
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
            eos_token_ids: the model's.
            bad_words: token ids of the words that must not be generated.
            priority: smaller is more urgent.
            cache_salt: only requests of the same salt share cached prefixes.
            followed: whoever made it hands out its outputs, so the engine's `step` does not.
        """
        self.request_id = request_id
        self.followed = followed
        self.params = params
        self.bad_words = bad_words
        self._shows_stop = params.include_stop_str_in_output
        self._texts = None if tokenizer is None else tokenizer.decoding.texts
        strings: list[str] = []
        #: Why a token of this id ended an answer; EOS ids that the user did not name have none.
        self._stop_reasons: dict[int, int | str] = {i: i for i in params.stop_token_ids or ()}
        if tokenizer is not None:
            strings, special = resolve_stops(
                tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens
            )
            self._stop_reasons.update(special)
        stop_ids = frozenset(self._stop_reasons)
        if not params.ignore_eos:
            stop_ids |= eos_token_ids
        self.completions: list[Completion] = []
        for index in range(params.n):
            sequence = Sequence(
                request_id if params.n == 1 else f"{request_id}[{index}]",
                prompt_token_ids,
                max_tokens=max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_ids,
                priority=priority,
                cache_salt=cache_salt,
                max_lag=0 if params.logits_processors else 1,
                parent_id=None if index == 0 else self.completions[0].sequence.request_id,
                prompt_logits=index == 0 and params.prompt_logprobs is not None,
            )
            detokenizer = None
            if tokenizer is not None:
                detokenizer = IncrementalDetokenizer(
                    tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    prompt_token_ids=prompt_token_ids,
                )
            self.completions.append(
                Completion(
                    sequence=sequence,
                    seed=seeds[index],
                    output=CompletionOutput(index=index),
                    detokenizer=detokenizer,
                    stops=StopMatcher(strings, params.include_stop_str_in_output)
                    if strings
                    else None,
                )
            )
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[c.output for c in self.completions],
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        if params.prompt_logprobs is not None:
            self.add_prompt_logprobs(1, [])

    @property
    def is_special(self) -> bool:
        """Whether steps must be looked through for what it wants besides tokens."""
        return self.params.prompt_logprobs is not None or bool(self.params.logits_processors)

    def add_prompt_logprobs(self, start: int, rows: list[RawLogprobs]) -> None:
        """Add those of the prompt's tokens from position `start` on.

        Mutates: `output`, once all of them are there.
        """
        # A prompt that was preempted halfway comes again from its beginning.
        new = rows[len(self._prompt_logprobs) - start :]
        self._prompt_logprobs += [row.named(self._texts) for row in new]
        if len(self._prompt_logprobs) == len(self.output.prompt_token_ids):
            self.output.prompt_logprobs = self._prompt_logprobs
            self.completions[0].sequence.prompt_logits = False

    def apply(self, completion: Completion, update: SequenceUpdate) -> bool:
        """Add a step's result to the outputs.

        Returns:
            Whether a stop string ended the sequence, which the scheduler cannot know.

        Mutates: `output`.
        """
        # Of most tokens all is said in a few lines: this runs for every one of every sequence.
        _, token, reason, error, logprobs = update
        out, stopped = completion.output, None
        if token is None:
            out.error = error
        else:
            if not out.token_ids:
                self._note_first_token(completion)
            text, detokenizer = "", completion.detokenizer
            if reason == "stop":
                out.stop_reason = self._stop_reasons.get(token)
                if not self._shows_stop:
                    detokenizer = None
            if detokenizer is not None:
                text, stops = detokenizer.push(token), completion.stops
                # Before `min_tokens` it is too early for any stop.
                if stops is not None and len(out.token_ids) + 1 >= self.params.min_tokens:
                    text, stopped = stops.push(text)
            out.append(token, text)
            if logprobs is not None:
                self._add_logprobs(completion, logprobs)
        if stopped is not None:
            out.stop_reason = stopped
            self._finish(completion, "stop")
            return reason is None
        if reason is not None:
            self._flush(completion)
            self._finish(completion, reason)
        return False

    def _note_first_token(self, completion: Completion) -> None:
        if self.output.metrics.first_token_time is None:
            self.output.metrics.first_token_time = time.monotonic()
            self.output.num_cached_tokens = completion.sequence.num_cached_tokens

    def _add_logprobs(self, completion: Completion, logprobs: object) -> None:
        assert isinstance(logprobs, RawLogprobs)
        out = completion.output
        if completion.logprobs is None:
            completion.logprobs = out.logprobs = LogprobSeries(self._texts)
        completion.logprobs.append(logprobs)
        out.cumulative_logprob = (out.cumulative_logprob or 0.0) + logprobs.value

    def _flush(self, completion: Completion) -> None:
        """Release what was held back: bytes that make no character, the beginning of a stop."""
        if completion.detokenizer is None:
            return
        text, stops = completion.detokenizer.flush(), completion.stops
        if stops is not None:
            text, stopped = stops.push(text)
            if stopped is None:
                text += stops.flush()
        completion.output.append_text(text)

    def _finish(self, completion: Completion, reason: str) -> None:
        completion.output.finish_reason = reason
        self._finish_if_all_are()

    def _finish_if_all_are(self) -> None:
        if all(c.output.finished for c in self.completions):
            self.output.metrics.finished_time = time.monotonic()
            self.output.finished = True

    def end(self, reason: str, error: str | None = None) -> None:
        """End every unfinished answer. Mutates: `output`."""
        for completion in self.completions:
            if not completion.output.finished:
                completion.output.error = error
                self._flush(completion)
                completion.output.finish_reason = reason
        self._finish_if_all_are()
