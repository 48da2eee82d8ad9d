"""Claims about a model whose steps are CUDA graphs: they are as right, and as reproducible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance import graphs
from tvr.conformance.engine_graph import CapturedDecode, ReplayedChunks
from tvr.conformance.engine_model import op_table
from tvr.conformance.engine_run import PagedRun, prefill_and_decode
from tvr.conformance.engine_trial import Trial
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check
from tvr.conformance.model_spec import ENGINE, batch_invariant, bound_specs, model_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.model_spec import ModelSpec
    from tvr.conformance.subject import Subject

#: Rows of a graph of decodes, as an engine has them.
_SIZES = (1, 2, 4, 8)


def check_graph_replay_equals_eager(backend: Subject, case: Case) -> None:
    """A decode step captured as a graph is as right on other batches as it is run eagerly."""
    trial = Trial(backend, case)
    b = trial.block_size
    cached = {"one": 1, "edge": b - 1, "long": 2 * b}
    texts = {name: trial.text(n + 3) for name, n in cached.items()}
    eager, replayed = PagedRun(trial.model), PagedRun(trial.model, block_seed=1)
    for run in (eager, replayed):
        for name, n in cached.items():
            run.step(prefill={name: texts[name].ids[:n]})
    captured = CapturedDecode(replayed, num_rows=4)
    done = dict(cached)
    for names in (["long"], ["edge", "one", "long"], ["one"], ["edge", "long"], ["one", "edge"]):
        tokens = {name: texts[name].ids[done[name]] for name in names}
        steps = {"eager": eager.step(decode=tokens), "replayed": captured.step(tokens)}
        for name in names:
            done[name] += 1
            for how, found in steps.items():
                trial.judge(f"token {done[name] - 1} {how}", texts[name], found[name], done[name])


def check_batch_invariant_graphs_keep_their_bits(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, decodes in a graph of any size have the bits they have alone."""
    alone = _Alone(backend, case)
    names = list(alone.texts)
    for size in _SIZES:
        run = PagedRun(alone.trial.model)
        for name, ids in alone.texts.items():
            run.step(prefill={name: ids[:-2]})
        captured = CapturedDecode(run, num_rows=size)
        for place in (-2, -1):
            for i in range(0, len(names), size):
                tokens = {name: alone.texts[name][place] for name in names[i : i + size]}
                alone.judge(f"in a graph of {size} decodes", captured.step(tokens), place)
        alone.judge_cached(f"in a graph of {size} decodes", run)


def check_batch_invariant_chunks_in_graphs_keep_their_bits(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, chunks in a graph, decodes beside them, have their own bits."""
    alone = _Alone(backend, case)
    first, *rest = alone.texts
    run = ReplayedChunks(alone.trial.model)
    alone.judge("in a graph", run.step(prefill={first: alone.texts[first][:-2]}), -3)
    # All but the last two tokens, which decode alone: chunks are another op's, with other bits.
    for place, chunk, last in ((-2, slice(None, -3), -4), (-1, slice(-3, -2), -3)):
        chunks = {name: alone.texts[name][chunk] for name in rest}
        found = run.step(decode={first: alone.texts[first][place]}, prefill=chunks)
        alone.judge("beside chunks in a graph", {first: found.pop(first)}, place)
        alone.judge("in a graph", found, last)
    alone.judge_cached("in a graph", run)


class _Alone:
    """A batch-invariant model, and what some texts give when each is computed alone, eagerly.

    Attributes:
        trial: the model.
        texts: token ids by name.
    """

    def __init__(self, backend: Subject, case: Case) -> None:
        self.trial = Trial(backend, case, batch_invariant=True)
        b = self.trial.block_size
        self.texts = {f"text {n}": self.trial.random_ids(n + 2) for n in (2 * b + 3, 2, b - 1)}
        self._run = PagedRun(self.trial.model)
        self._logits = {
            name: prefill_and_decode(self._run, name, ids) for name, ids in self.texts.items()
        }

    def judge(self, how: str, found: Mapping[str, Tensor], last: int) -> None:
        """Hold the logits of some texts against their own; `last` is the place of the last token,
        counted from a text's end by numbers below 0."""
        for name, logits in found.items():
            end = len(self.texts[name]) + last + 1
            same_bits(f"{name} {how}", logits, self._logits[name][end - len(logits) : end])

    def judge_cached(self, how: str, run: PagedRun) -> None:
        """Hold K and V of all texts, as far as they are computed, against their own."""
        for name in self.texts:
            for layer in range(self.trial.spec.num_layers):
                pairs = zip(run.cached(name, layer), self._run.cached(name, layer), strict=True)
                for what, (cached, own) in zip("KV", pairs, strict=True):
                    found = f"{what} of {name} in layer {layer} {how}"
                    same_bits(found, cached, own[: len(cached)])


#: An engine calls them around the layers; the checks here do not.
_NOT_OF_LAYERS = ("argmax", "prepare_step", "sample", "top_logprobs")


def needs_capturable_ops(backend: Subject, case: Case) -> list[str]:
    """Return which ops of a decode step may not be captured, of whichever backend they are."""
    return _lacking(backend, model_spec(case), "attention_prefill")


def needs_capturable_invariant_ops(backend: Subject, case: Case) -> list[str]:
    """The same of ops that are bound as batch_invariant."""
    return _lacking(backend, batch_invariant(case), "attention_prefill")


def needs_capturable_invariant_layers(backend: Subject, case: Case) -> list[str]:
    """The same, prefill included."""
    return _lacking(backend, batch_invariant(case))


def _lacking(backend: Subject, spec: ModelSpec, *elsewhere: str) -> list[str]:
    if reasons := graphs.why_not(backend):
        return reasons
    table = op_table(backend)
    for op_spec in bound_specs(spec):
        if op_spec.op not in (*_NOT_OF_LAYERS, *elsewhere):
            table.bind(op_spec)
    return [
        f"{op} of backend {name!r} is not declared cuda_graph"
        for op, names in table.lacking("cuda_graph").items()
        for name in names
    ]


CHECKS = (
    Check(run=check_graph_replay_equals_eager, ops=ENGINE, needs=needs_capturable_ops),
    Check(
        run=check_batch_invariant_graphs_keep_their_bits,
        ops=ENGINE,
        also=batch_invariant,
        needs=needs_capturable_invariant_ops,
    ),
    Check(
        run=check_batch_invariant_chunks_in_graphs_keep_their_bits,
        ops=ENGINE,
        also=batch_invariant,
        needs=needs_capturable_invariant_layers,
    ),
)
