"""What the engine checks share: a case's model on the backend under test, and what is right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from tvr.conformance import tolerance
from tvr.conformance.engine_exact import exact_logits
from tvr.conformance.engine_model import TinyModel, model_config, random_weights, reference_for
from tvr.conformance.engine_run import PagedRun
from tvr.conformance.judge import same_bits, within
from tvr.conformance.model_spec import ModelSpec, model_spec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


class Text(NamedTuple):
    """Token ids with the logits [n, vocab] fp64 behind each, and how far off one may be."""

    ids: list[int]
    exact: Tensor
    limit: float


class Trial:
    """A case's model on the backend under test, and texts whose logits are known.

    Args:
        backend, case: as a check is given them.
        changes: fields of the spec to change.

    Attributes:
        spec: the model's shape.
        block_size: tokens in a block, which the lengths of texts go by.
        weights: the model's weights, in its dtype, on the CPU.
        model: the model on the backend under test.
    """

    def __init__(self, backend: Subject, case: Case, **changes: object) -> None:
        self.spec = replace(model_spec(case), **changes)  # type: ignore[arg-type]
        self.block_size = self.spec.block_size
        self.weights = random_weights(case, self.spec)
        self.model = TinyModel(backend, self.spec, self.weights)
        self._backend = backend
        self._references: dict[ModelSpec, TinyModel] = {}
        self._ids = case.generator().manual_seed(case.generator().initial_seed() + 1)

    def random_ids(self, n: int) -> list[int]:
        """Return n random token ids, others each time."""
        ids: list[int] = torch.randint(self.spec.vocab_size, (n,), generator=self._ids).tolist()
        return ids

    def text(self, n: int) -> Text:
        """Return n random tokens and what is right behind each, others each time."""
        return self.text_of(self.random_ids(n))

    def text_of(self, ids: list[int]) -> Text:
        """Return these tokens and what is right behind each."""
        exact = exact_logits(model_config(self.spec), self.weights, ids)
        error = 0.0
        if self.spec.dtype != "float32":
            plain = PagedRun(self.reference()).step(prefill={"text": ids})["text"]
            error = (plain.double() - exact).abs().max().item()
        limit = tolerance.logits_limit(
            self.spec.dtype, error, exact.abs().max().item(), self._chain_length()
        )
        return Text(ids, exact, limit)

    def reference(self, **changes: object) -> TinyModel:
        """Return the same model, but for `changes` of its spec, on the reference backend."""
        spec = replace(self.spec, **changes)  # type: ignore[arg-type]
        if spec not in self._references:
            self._references[spec] = TinyModel(reference_for(self._backend), spec, self.weights)
        return self._references[spec]

    def judge(self, what: str, text: Text, found: Tensor, end: int) -> None:
        """Hold logits [n, vocab] behind the n tokens of `text` up to `end` against the exact."""
        wanted = text.exact[end - len(found) : end]
        within(what, found, wanted, text.limit, f"must be within {text.limit:.3g}")

    def judge_again(self, what: str, text: Text, found: Tensor, wanted: Tensor) -> None:
        """Judge logits behind all of `text`; if every op is declared deterministic, by bits too.

        `wanted` are those of another run, which differs in nothing that may matter.
        """
        self.judge(what, text, found, len(text.ids))
        if not self.model.ops.lacking("deterministic"):
            same_bits(what, found, wanted)

    def _chain_length(self) -> int:
        """Return the number of ops that a logit comes through."""
        return 9 * self.spec.num_layers + 2
