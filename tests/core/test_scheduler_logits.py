"""Sequences that want the logits of their whole prompt."""

from __future__ import annotations

from tvr.core import Result, Scheduler, Sequence

PROMPT = list(range(40))


def new_scheduler():
    return Scheduler(
        num_blocks=32, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_lag=0
    )


def run(scheduler, sequence):
    """Run a sequence alone to its end; return its prefill chunks as (start, tokens, logits)."""
    scheduler.add(sequence)
    chunks = []
    while (output := scheduler.schedule()) is not None:
        chunks += [
            (e.start, e.num_tokens, e.logit_rows) for e in output.entries[output.num_decodes :]
        ]
        results = [Result(e.request_id, e.epoch, 7) for e in output.entries if e.samples]
        scheduler.update(output.step_id, results)
    return chunks


def test_every_chunk_asks_for_all_its_logits():
    asked = Sequence("a", PROMPT, max_tokens=2, prompt_logits=True)
    assert run(new_scheduler(), asked) == [(0, 16, 16), (16, 16, 16), (32, 8, 8)]
    plain = Sequence("a", PROMPT, max_tokens=2)
    assert run(new_scheduler(), plain) == [(0, 16, 0), (16, 16, 0), (32, 8, 1)]


def test_cached_blocks_are_not_taken_and_its_own_serve_others():
    scheduler = new_scheduler()
    for name in "ab":
        asked = Sequence(name, PROMPT, max_tokens=2, prompt_logits=True)
        assert run(scheduler, asked)[0] == (0, 16, 16)
        assert asked.num_cached_tokens == 0
    plain = Sequence("c", PROMPT, max_tokens=2)
    assert run(scheduler, plain) == [(32, 8, 1)]
    assert plain.num_cached_tokens == 32
    counts = scheduler.block_manager.counts()
    assert counts.used == counts.held == 0
