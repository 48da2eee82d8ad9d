"""Claims about a model and its KV cache: what is in it, where, and what was there before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.conformance import tolerance
from tvr.conformance.engine_run import PagedRun, in_chunks, prefill_and_decode, token_by_token
from tvr.conformance.engine_trial import Trial
from tvr.conformance.judge import small_frobenius
from tvr.conformance.ledger import Check
from tvr.conformance.model_spec import ENGINE

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject


def check_cached_keys_ignore_chunking(backend: Subject, case: Case) -> None:
    """Positions go on across chunks: the first layer caches the keys of a one-shot prefill."""
    trial = Trial(backend, case)
    b = trial.block_size
    ids = trial.random_ids(2 * b + 3)
    whole, chunked = PagedRun(trial.model), PagedRun(trial.model)
    whole.step(prefill={"text": ids})
    in_chunks(chunked, "text", ids, [b - 1, b + 1])
    token_by_token(chunked, "text", ids[2 * b :])
    # Products of other numbers of rows may sum in another order; all else is done row by row.
    limit = 2 * tolerance.frobenius_limit(trial.spec.dtype, trial.spec.hidden_size)
    pairs = zip("KV", chunked.cached("text", 0), whole.cached("text", 0), strict=True)
    for what, found, wanted in pairs:
        for position in range(len(ids)):
            one = f"{what} at position {position}"
            small_frobenius(one, found[position], wanted[position].double(), limit)


def check_physical_blocks_do_not_matter(backend: Subject, case: Case) -> None:
    """A model is as right, deterministic ops bit for bit, wherever a sequence's blocks lie."""
    trial = Trial(backend, case)
    text = trial.text(2 * trial.block_size + 5)
    wanted = prefill_and_decode(PagedRun(trial.model), "text", text.ids)
    for block_seed in (1, 2):
        run = PagedRun(trial.model, block_seed=block_seed)
        found = prefill_and_decode(run, "text", text.ids)
        trial.judge_again("blocks renamed", text, found, wanted)


def check_reused_blocks_hold_nothing_old(backend: Subject, case: Case) -> None:
    """In blocks that others have used a model is as right, by bits if deterministic, as in new."""
    trial = Trial(backend, case)
    n = 2 * trial.block_size + 5
    old, text = trial.random_ids(n), trial.text(n)
    new = text.ids
    wanted = prefill_and_decode(PagedRun(trial.model), "new", new)
    for unused in (float("nan"), 0.0):
        run = PagedRun(trial.model, unused=unused)
        for ids in (old, old[::-1], new[::-1]):
            prefill_and_decode(run, "old", ids)
            run.forget("old")
        found = prefill_and_decode(run, "new", new)
        trial.judge_again("in used blocks", text, found, wanted)


def check_shared_prefix_is_attended_to(backend: Subject, case: Case) -> None:
    """A sequence that begins with another's blocks is right, beside one that has no prefix."""
    trial = Trial(backend, case)
    b = trial.block_size
    parent, fresh = trial.text(2 * b + 1), trial.text(b + 4)
    child = trial.text_of(parent.ids[:b] + trial.random_ids(4))
    run = PagedRun(trial.model)
    run.step(prefill={"parent": parent.ids[:-1]})
    run.share("child", "parent", b)
    found = run.step(
        decode={"parent": parent.ids[-1]},
        prefill={"child": child.ids[b:], "fresh": fresh.ids},
    )
    for name, text in (("parent", parent), ("child", child), ("fresh", fresh)):
        trial.judge(name, text, found[name], len(text.ids))


CHECKS = (
    Check(run=check_cached_keys_ignore_chunking, ops=ENGINE),
    Check(run=check_physical_blocks_do_not_matter, ops=ENGINE),
    Check(run=check_reused_blocks_hold_nothing_old, ops=ENGINE),
    Check(run=check_shared_prefix_is_attended_to, ops=ENGINE),
)
