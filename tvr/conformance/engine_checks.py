"""Claims about a whole model whose ops are the backend's: they hold only if its ops fit together.

Each is judged against the same model in fp64, and where the numerics promise bits, by bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance import engine_checks_cache, engine_checks_graph, engine_checks_tokens
from tvr.conformance.engine_run import PagedRun, in_chunks, token_by_token
from tvr.conformance.engine_trial import Trial
from tvr.conformance.ledger import Check
from tvr.conformance.model_spec import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


def check_decode_equals_longer_prefill(backend: Subject, case: Case) -> None:
    """A token decoded behind n others has the logits it has at the end of a prefill of n + 1."""
    trial = Trial(backend, case)
    b = trial.block_size
    text = trial.text(2 * b + 3)
    for n in (1, b - 1, b, b + 1, 2 * b + 2):
        run = PagedRun(trial.model)
        run.step(prefill={"decoded": text.ids[:n]})
        decoded = token_by_token(run, "decoded", text.ids[n : n + 1])
        trial.judge(f"decoded behind {n} tokens", text, decoded, n + 1)
        prefilled = run.step(prefill={"prefilled": text.ids[: n + 1]})["prefilled"]
        trial.judge(f"prefill of {n + 1} tokens", text, prefilled, n + 1)


def check_chunked_prompt_equals_one_shot(backend: Subject, case: Case) -> None:
    """A prompt gives the same logits in chunks of any size as in one piece."""
    trial = Trial(backend, case)
    b = trial.block_size
    text = trial.text(2 * b + 3)
    n = len(text.ids)
    for sizes in ([n], [b, b, 3], [1, b - 2, n - b + 1], [b + 1, n - b - 2, 1]):
        found = in_chunks(PagedRun(trial.model), "text", text.ids, sizes)
        trial.judge(f"in chunks of {sizes}", text, found, n)


def check_mixed_step_equals_each_alone(backend: Subject, case: Case) -> None:
    """Decodes, a first chunk and a later chunk in one step are each as right as alone."""
    trial = Trial(backend, case)
    b = trial.block_size
    cached = {"long": 2 * b + 1, "short": 3, "later": b - 1, "first": 0}
    new = {"long": 1, "short": 1, "later": b + 2, "first": b + 3}
    texts = {name: trial.text(cached[name] + new[name]) for name in cached}

    def last_tokens(names: Iterable[str]) -> dict[str, Tensor]:
        """Compute the new tokens of these sequences in one step."""
        run = PagedRun(trial.model)
        for name in names:
            if cached[name]:
                run.step(prefill={name: texts[name].ids[: cached[name]]})
        rest = {name: texts[name].ids[cached[name] :] for name in names}
        return run.step(
            decode={name: ids[0] for name, ids in rest.items() if len(ids) == 1},
            prefill={name: ids for name, ids in rest.items() if len(ids) > 1},
        )

    for names in (*([name] for name in cached), list(cached)):
        for name, found in last_tokens(names).items():
            what = f"{name} in a step of {', '.join(names)}"
            trial.judge(what, texts[name], found, len(texts[name].ids))


CHECKS = (
    Check(run=check_decode_equals_longer_prefill, ops=ENGINE),
    Check(run=check_chunked_prompt_equals_one_shot, ops=ENGINE),
    Check(run=check_mixed_step_equals_each_alone, ops=ENGINE),
    *engine_checks_graph.CHECKS,
    *engine_checks_cache.CHECKS,
    *engine_checks_tokens.CHECKS,
)
