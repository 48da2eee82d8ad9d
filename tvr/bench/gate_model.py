"""No number without a right model: logits are held against those of the same model in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tvr.bench.engine_model import BenchModel, others_at_work, refuse_others
from tvr.bench.engine_text import (
    Reading,
    read_by_decode,
    read_by_prefill,
    write_freely,
    write_text,
)
from tvr.conformance import tolerance
from tvr.conformance.ledger import CheckFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvr.core.llm import LLM

REFERENCE = "torch"

#: Tokens of the text's prompt and of its answer; less of both in a short context.
NUM_PROMPT, NUM_TOKENS = 24, 64

#: The sequences of a batch start at this many places of the answer, so that each stands elsewhere.
_STARTS = 8

#: Of the references' pools: some dozens of sequences.
_NUM_BLOCKS = 256

#: In fp32 equal tokens are asked for, so the text must be one in which none is a toss-up.
_MOST_TEXTS = 8


class ModelGate:
    """Judges engines on one model.

    Builds the fp32 reference first, keeps what it wrote, and closes it; then, in half precision,
    the same backend in the dtype that is measured, whose error is the measure of others'.

    Args:
        model: what is measured.

    Attributes:
        text: what the reference wrote.
        limit: the largest error of a logit.
        reference_error: that of the `torch` backend in the same dtype; fp32: 0.

    Raises:
        TvrError: the reference cannot be loaded, or is not torch's alone.
    """

    def __init__(self, model: BenchModel) -> None:
        num_prompt, num_tokens = gate_lengths(model)
        self._is_fp32 = model.dtype == "float32"
        num_ops = 9 * model.config.num_layers + 2  # that a logit comes through
        with _reference(model, "float32") as llm:
            for seed in range(_MOST_TEXTS):
                self.text = write_text(llm, num_prompt, num_tokens, seed)
                largest = float(self.text.logits.abs().max())
                self.limit = tolerance.logits_limit("float32", 0.0, largest, num_ops)
                if not self._is_fp32 or self.text.smallest_gap > 2 * self.limit:
                    break
        self.reference_error = 0.0
        if not self._is_fp32:
            with _reference(model, model.dtype) as llm:
                readings = read_by_prefill(llm, self.text)
                # All starts: of more readings the largest error is larger.
                readings += read_by_decode(llm, self.text, self._starts(_STARTS))
            self.reference_error = max(reading.error for reading in readings)
            self.limit = tolerance.LOGITS_MAX_ERROR_FACTOR * self.reference_error

    def facts(self, llm: LLM, backend: str, batch: int) -> dict[str, Any]:
        """Return what a row of `backend` says of its engine: of the gate, and who else is at work.

        Raises:
            CheckFailed: as `judge` does.
        """
        found: dict[str, Any] = {"gate": self.judge(llm, batch)}
        if others := others_at_work(llm, backend):
            found["other_backends"] = others
        return found

    def judge(self, llm: LLM, batch: int) -> dict[str, Any]:
        """Return what was found, as JSON-able data: the engine is right.

        It reads the text as prompts of every length, then token by token as a batch of `batch`
        sequences; at last it writes as it does when it is timed.

        Raises:
            CheckFailed: says what is wrong.
        """
        starts = self._starts(batch)
        ways: dict[str, Callable[[], list[Reading]]] = {
            "prefill": lambda: read_by_prefill(llm, self.text),
            "decode": lambda: read_by_decode(llm, self.text, starts),
            "generation": lambda: write_freely(llm, self.text, starts),
        }
        found: list[Reading] = []
        for way, read in ways.items():
            try:
                readings = read()
                self._judge(readings)
            except CheckFailed as fault:
                raise CheckFailed(f"{way}: {fault}") from fault
            found += readings
        return {
            "tokens": len(self.text.tokens),
            "max_error": _rounded(max(reading.error for reading in found)),
            "reference_error": _rounded(self.reference_error),
            "limit": _rounded(self.limit),
            "other_tokens": len(self._differing(found)),
        }

    def _judge(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            where = f"{reading.place} tokens into the answer"
            if not reading.error <= self.limit:  # a NaN is over any limit
                raise CheckFailed(
                    f"a logit is {reading.error:.3g} off the fp32 reference's {where}; the limit "
                    f"is {self.limit:.3g} ({self._reason()})"
                )
        for reading in self._differing(readings):
            where = f"{reading.place} tokens into the answer"
            mine, wanted = reading.token, self.text.tokens[reading.place]
            if self._is_fp32:
                raise CheckFailed(f"token {mine} comes where fp32 has {wanted}, {where}")
            if not reading.gap < 2 * self.limit:
                raise CheckFailed(
                    f"token {mine} comes where fp32 has {wanted}, ahead by {reading.gap:.3g}, "
                    f"{where}; that may be {2 * self.limit:.3g}"
                )

    def _differing(self, readings: Iterable[Reading]) -> list[Reading]:
        return [r for r in readings if r.token != self.text.tokens[r.place]]

    def _reason(self) -> str:
        if self._is_fp32:
            return "what rounding costs"
        return (
            f"{tolerance.LOGITS_MAX_ERROR_FACTOR:g} times that of {REFERENCE} in the same dtype, "
            f"{self.reference_error:.3g}"
        )

    def _starts(self, batch: int) -> Sequence[int]:
        return [i % min(_STARTS, len(self.text.tokens)) for i in range(batch)]


def gate_lengths(model: BenchModel) -> tuple[int, int]:
    """Return how many tokens the text's prompt and answer have: fewer in a short context."""
    num_prompt = min(NUM_PROMPT, model.most_tokens // 2)
    return num_prompt, min(NUM_TOKENS, model.most_tokens - num_prompt)


@contextmanager
def _reference(model: BenchModel, dtype: str) -> Iterator[LLM]:
    context = sum(gate_lengths(model))
    # Torch pays dearly for batch invariance, and is no more right with it.
    plain = replace(model, batch_invariant=False)
    llm = plain.load(REFERENCE, context=context, dtype=dtype, num_blocks=_NUM_BLOCKS)
    try:
        refuse_others(llm, REFERENCE)
        yield llm
    finally:
        llm.close()


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
