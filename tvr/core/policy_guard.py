"""Between the scheduler and a policy: asks, judges the answers, and does without it if it must."""

from __future__ import annotations

from numbers import Real
from operator import index
from typing import NoReturn

from tvr.core.placement import Placement
from tvr.core.policy import FirstComeFirstServed, SchedulingPolicy
from tvr.core.sequence import Sequence
from tvr.core.waiting_queue import WaitingQueue
from tvr.errors import ConfigError, PolicyError

_QUESTIONS = ("admission_rank", "preemption_rank", "prefill_budget")


def check_policy(name: str, policy: object) -> None:
    """Check that the argument `name` is a policy.

    Raises:
        ConfigError: it is not.
    """
    missing = [question for question in _QUESTIONS if not callable(getattr(policy, question, None))]
    if isinstance(policy, type) or missing:
        found = f"lacks {', '.join(missing)}" if missing else "is a class, not an object of it"
        raise ConfigError(
            f"{name} = {policy!r} {found}; give an object with {', '.join(_QUESTIONS)}"
        )


class PolicyGuard:
    """Asks a policy all it has to be asked for a step, before anything of the step is decided.

    So if it fails, nothing has changed yet: the error is raised, and the policy set aside.

    Args:
        policy: what to ask.
        waiting: the line, whose newcomers it ranks.
        placement: the running sequences.
        max_num_batched_tokens: most tokens in a step.

    Raises:
        ConfigError: `policy` is none.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        waiting: WaitingQueue,
        placement: Placement,
        max_num_batched_tokens: int,
    ) -> None:
        self._waiting = waiting
        self._placement = placement
        self._max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy

    @property
    def policy(self) -> SchedulingPolicy:
        """The policy in force; setting it ranks all that wait anew."""
        return self._policy

    @policy.setter
    def policy(self, policy: SchedulingPolicy) -> None:
        check_policy("policy", policy)
        self._policy = policy
        # The default has one answer to everything; not asking keeps its steps cheap.
        self._is_default = type(policy) is FirstComeFirstServed
        self._waiting.unrank()
        for seq in self._placement.running.values():
            seq.rank = ()

    def plan(self) -> tuple[list[Sequence], int]:
        """Rank the newcomers in the line, and return what else a step must know of the policy.

        Returns:
            The running sequences, each able to take blocks from those behind it, the oldest
            first of all; and the most tokens that the step may spend on prefills.

        Raises:
            PolicyError: the policy failed. The default one has taken its place.
        """
        try:
            if self._waiting.unranked:
                seqs = self._waiting.unranked.values()
                self._waiting.rank([self._rank("admission_rank", seq) for seq in seqs])
            running = list(self._placement.running.values())
            if self._is_default:
                return running, self._max_num_batched_tokens
            return self._ask_for_step(running)
        except Exception:
            self.policy = FirstComeFirstServed()
            raise

    def _ask_for_step(self, running: list[Sequence]) -> tuple[list[Sequence], int]:
        blocks = self._placement.blocks
        num_decodes = num_blocks = 0
        for seq in running:
            if seq.num_scheduled >= seq.num_prefill:
                num_decodes += 1
                num_blocks += seq.num_scheduled == len(seq.block_ids) * blocks.block_size
        budget = self._max_num_batched_tokens - num_decodes
        if budget and (num_decodes < len(running) or self._waiting):
            budget = self._prefill_budget(budget, num_decodes)
        if num_blocks > blocks.num_free:
            ranks = [(self._rank("preemption_rank", seq), -seq.arrival) for seq in running[1:]]
            by_rank = sorted(zip(ranks, running[1:], strict=True), reverse=True)
            running[1:] = [seq for _, seq in by_rank]
        return running, budget

    def _rank(self, question: str, seq: Sequence) -> tuple[float, ...]:
        """Ask for a rank and make it a tuple, so that any two can be compared."""
        answer = self._ask(question, seq)
        rank = answer if isinstance(answer, tuple) else (answer,)
        for number in rank:
            if not isinstance(number, Real) or number != number:
                self._refuse(question, answer, "a number or a tuple of numbers")
        return rank

    def _prefill_budget(self, num_tokens: int, num_decodes: int) -> int:
        answer = self._ask("prefill_budget", num_tokens, num_decodes)
        try:
            number = index(answer)  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if number < 0:
            self._refuse("prefill_budget", answer, "a whole number of tokens, 0 or more")
        return max(1, min(number, num_tokens))  # 1: a prompt always gets on

    def _ask(self, question: str, *args: object) -> object:
        try:
            answer: object = getattr(self._policy, question)(*args)
        except Exception as error:
            reason = " ".join(str(error).split())
            self._fail(f"{question} raised {type(error).__name__}: {reason}", error)
        return answer

    def _refuse(self, question: str, answer: object, allowed: str) -> NoReturn:
        self._fail(f"{question} returned {answer!r}, not {allowed}")

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        raise PolicyError(
            f"scheduling policy {type(self._policy).__name__}: {what}; no request is lost, they go"
            " on first come, first served; mend the policy"
        ) from cause
