"""Scheduling policies: who goes first, who gives way, how a step is shared.

A policy answers three questions with numbers. It names no block, row or step, so whatever it
answers, the scheduler's own rules hold: see `docs/scheduler.md`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from tvr.core.sequence import Sequence

Rank: TypeAlias = float | tuple[float, ...]


class SchedulingPolicy(Protocol):
    """What a scheduler asks; subclass `FirstComeFirstServed` to answer only some of it.

    Ranks are numbers or tuples of numbers, and the smallest is the first. A policy reads the
    sequences it is shown and changes nothing. Should it raise, or answer something else, then
    `Scheduler.schedule` raises `PolicyError` once and goes on without it.
    """

    def admission_rank(self, seq: Sequence) -> Rank:
        """Rank a sequence that waits; of equal ones the earlier arrival goes first.

        Asked once each time it joins the line: when it is new and when it has been preempted. The
        order of prefills that take several steps is the same.
        """
        ...

    def preemption_rank(self, seq: Sequence) -> Rank:
        """Rank a running sequence among those to preempt; of equal ones the later arrival goes.

        Asked for all of them when a step needs more blocks than are free. None but the oldest can
        take blocks from a sequence that ranks behind itself.
        """
        ...

    def prefill_budget(self, num_tokens: int, num_decodes: int) -> int:
        """Return how many tokens the next step may spend on prefills.

        Asked in every step in which some sequence waits or is in its prefill.

        Args:
            num_tokens: what the step has room for beside its decodes, at least 1.
            num_decodes: sequences past their prefill.

        Returns:
            At least 0. At least 1 and at most `num_tokens` are granted.
        """
        ...


class FirstComeFirstServed:
    """The default: the first to arrive is admitted first and preempted last."""

    def admission_rank(self, seq: Sequence) -> Rank:
        """Equal for all: the order of arrival."""
        return 0

    def preemption_rank(self, seq: Sequence) -> Rank:
        """Equal for all: the newest goes."""
        return 0

    def prefill_budget(self, num_tokens: int, num_decodes: int) -> int:
        """All there is."""
        return num_tokens


class ShortestPromptFirst(FirstComeFirstServed):
    """Short prompts are admitted before long ones: most requests see their first token sooner."""

    def admission_rank(self, seq: Sequence) -> Rank:
        """The length of the prompt; before all of these, those whose answers have begun."""
        return (seq.num_output_tokens == 0, seq.num_prompt_tokens)


class PriorityFirst(FirstComeFirstServed):
    """The smallest `Sequence.priority` is admitted first and preempted last."""

    def admission_rank(self, seq: Sequence) -> Rank:
        """The priority."""
        return seq.priority

    def preemption_rank(self, seq: Sequence) -> Rank:
        """The priority, largest first."""
        return -seq.priority
