"""Claims about the tokens of a model, its precision, and what neighbours change: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.conformance import tolerance
from tvr.conformance.engine_run import PagedRun, in_chunks, prefill_and_decode, token_by_token
from tvr.conformance.engine_serve import greedy_tokens
from tvr.conformance.engine_trial import Trial
from tvr.conformance.judge import same_bits, small_frobenius
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.model_spec import ENGINE, batch_invariant

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


def check_greedy_tokens_match_reference(backend: Subject, case: Case) -> None:
    """An fp32 engine gives the reference's tokens, up to a tie that fp32 cannot tell apart."""
    trial = Trial(backend, case)
    b, num_tokens = trial.block_size, 6
    prompts = [trial.random_ids(n) for n in (1, b, 2 * b + 3)]
    prompts.append(prompts[-1][: b + 1])  # one that finds its first block cached
    found = greedy_tokens(trial.model, prompts, num_tokens)
    wanted = greedy_tokens(trial.reference(), prompts, num_tokens)
    for i, prompt in enumerate(prompts):
        pairs = enumerate(zip(found[i], wanted[i], strict=True))
        place = next((place for place, (token, right) in pairs if token != right), None)
        if place is not None:  # from there on the two engines continue other texts
            text = trial.text_of(prompt + wanted[i][:place])
            what = f"prompt {i}, token {place}"
            _refuse_clear_choice(what, text.exact[-1], found[i][place], text.limit)


def check_half_precision_errs_like_reference(backend: Subject, case: Case) -> None:
    """Fed the fp32 tokens, the logits err at most 1.5 times as much as torch in this dtype."""
    trial = Trial(backend, case)
    b = trial.block_size
    prompt = trial.random_ids(b + 3)
    (answer,) = greedy_tokens(trial.reference(dtype="float32"), [prompt], b)
    text = trial.text_of(prompt + answer[:-1])

    def logits(run: PagedRun) -> Tensor:
        prefilled = in_chunks(run, "text", prompt, [5, b - 2])
        return torch.cat([prefilled, token_by_token(run, "text", answer[:-1])])

    found = logits(PagedRun(trial.model))
    plain = logits(PagedRun(trial.reference()))
    error = (plain.double() - text.exact).norm() / text.exact.norm()
    limit = tolerance.LOGITS_ERROR_FACTOR * error.item()
    small_frobenius("logits", found, text.exact, limit)
    trial.judge("logits", text, found, len(text.ids))
    with trial.model.on_device():
        rows = found.to(trial.model.device)
        chosen = torch.full((len(rows),), -7, device=rows.device)
        trial.model.step_ops.argmax(rows, out=chosen)
        tokens = chosen.tolist()
    for position, token in enumerate(tokens):
        _refuse_clear_choice(f"position {position}", text.exact[position], token, text.limit)


def check_batch_invariant_model_keeps_its_bits(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, tokens, K and V keep their bits in any batch and any chunks."""
    trial = Trial(backend, case, batch_invariant=True)
    b = trial.block_size
    texts = {f"text {n}": trial.random_ids(n) for n in (2 * b + 3, 5, b + 1)}
    alone, batch = PagedRun(trial.model), PagedRun(trial.model)
    wanted = {name: prefill_and_decode(alone, name, ids) for name, ids in texts.items()}
    parts = [batch.step(prefill={name: ids[:2] for name, ids in texts.items()})]
    parts.append(batch.step(prefill={name: ids[2:-2] for name, ids in texts.items()}))
    for place in (-2, -1):
        parts.append(batch.step(decode={name: ids[place] for name, ids in texts.items()}))
    for name in texts:
        found = torch.cat([part[name] for part in parts])
        same_bits(f"{name} in a batch", found, wanted[name])
        for layer in range(trial.spec.num_layers):
            pairs = zip("KV", batch.cached(name, layer), alone.cached(name, layer), strict=True)
            for what, cached, cached_alone in pairs:
                same_bits(f"{what} of {name} in layer {layer}", cached, cached_alone)


def _refuse_clear_choice(what: str, exact: Tensor, token: int, limit: float) -> None:
    """Refuse a token whose logit is below the largest by more than two errors explain."""
    if not 0 <= token < len(exact):
        raise CheckFailed(f"{what}: token {token} is not among {len(exact)}")
    gap = (exact.max() - exact[token]).item()
    if gap > 2 * limit:
        raise CheckFailed(
            f"{what}: chose {token}, whose logit is {gap:.3g} below that of "
            f"{int(exact.argmax())}; errors explain at most {2 * limit:.3g}"
        )


def _in_fp32(case: Case) -> bool:
    return case.spec.dtype == "float32"


def _in_half_precision(case: Case) -> bool:
    return not _in_fp32(case)


CHECKS = (
    Check(run=check_greedy_tokens_match_reference, ops=ENGINE, applies=_in_fp32),
    Check(run=check_half_precision_errs_like_reference, ops=ENGINE, applies=_in_half_precision),
    Check(run=check_batch_invariant_model_keeps_its_bits, ops=ENGINE, also=batch_invariant),
)
