"""What piles up between the engine and a client comes as one, with nothing lost."""

from __future__ import annotations

import asyncio
import json

import pytest

from tvr.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tvr.serve.admission import Admission
from tvr.serve.answer import EventStream, whole
from tvr.serve.deltas import Follower, Progress
from tvr.serve.errors import ApiError
from tvr.serve.job import Job
from tvr.serve.requests import StreamOptions

LOGPROB = {5: Logprob(-1.0, 1, "x")}


class Shape:
    """Shows deltas as they are."""

    def __init__(self):
        self.whole_head = self.piece_head = {"id": "x"}

    def whole(self, delivery):
        return self.pieces(delivery)

    pieces = staticmethod(
        lambda delivery: [{**d._asdict(), "prompt": delivery.prompt} for d in delivery.deltas]
    )


def output_of(num_answers):
    outputs = [CompletionOutput(index=i) for i in range(num_answers)]
    return RequestOutput("x", None, [1, 2], outputs, RequestMetrics(0.0))


def events_of(prompts, in_pool=asyncio.to_thread, echoes=False, **options):
    """Stream deltas that all come before the client's turn; return the events."""
    sent = []

    async def run():
        job = Job("x", 0.0, Admission(8), aborted.append, lambda job: None)
        job.streams = True
        job.echoes = echoes
        for prompt, steps in enumerate(prompts):
            job.submitted(f"x-{prompt}")
            output = output_of(2)
            follower = Follower(job, prompt, [Progress(), Progress()])
            for answer, text, reason in steps:
                out = output.outputs[answer]
                out.logprobs = [*(out.logprobs or []), LOGPROB]
                out.append(5, text)
                out.finish_reason = reason
                out.error = "out of luck" if reason == "error" else None
                output.finished = all(o.finished for o in output.outputs)
                job.put(follower.delivery(output))

        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        stream = EventStream(job, Shape(), StreamOptions(**options), in_pool)
        await stream({"type": "http"}, receive, send)
        assert job.closed

    aborted = []
    asyncio.run(run())
    body = b"".join(message.get("body", b"") for message in sent).decode()
    events = [event.removeprefix("data: ") for event in body.split("\n\n")[:-1]]
    return [e if e == "[DONE]" else json.loads(e) for e in events], aborted


def test_steps_that_piled_up_are_one_event_for_each_answer():
    ends = [(0, "c", "stop"), (1, "z", "length")]
    steps = [(0, "a", None), (1, "x", None), (0, "b", None), (1, "y", None), *ends]
    events, aborted = events_of([steps, steps])
    *chunks, done = events
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["prompt"], c["answer"], c["text"], c["finish_reason"]) for c in choices] == [
        (0, 0, "abc", "stop"),
        (0, 1, "xyz", "length"),
        (1, 2, "abc", "stop"),
        (1, 3, "xyz", "length"),
    ]
    assert all(c["token_ids"] == [5] * 3 and len(c["logprobs"]) == 3 for c in choices)
    assert aborted == []


def test_each_prompt_counts_once_as_it_begins():
    steps = [(0, "a", None), (1, "x", None), (0, "b", "stop"), (1, "y", "stop")]
    on = {"include_usage": True, "continuous_usage_stats": True}
    (*events, done), _ = events_of([steps, steps], **on)
    assert done == "[DONE]"
    counts = [(e["usage"]["prompt_tokens"], e["usage"]["completion_tokens"]) for e in events]
    assert counts == [(2, 4)] * 2 + [(4, 8)] * 3
    assert all(e["usage"]["total_tokens"] == sum(c) for e, c in zip(events, counts, strict=True))


def test_large_answers_are_made_beside_the_event_loop():
    """Those that begin with a long prompt, each of 128 of them, kept everybody waiting."""
    made = []

    async def in_pool(work):
        made.append(work)
        return await asyncio.to_thread(work)

    steps = [(0, "a", "stop"), (1, "x", "stop")]
    assert events_of([steps], in_pool)[0][-1] == "[DONE]"
    assert len(made) == 0
    assert events_of([steps], in_pool, echoes=True)[0][-1] == "[DONE]"
    assert len(made) == 1

    async def whole_of(text, echoes=False):
        job = Job("x", 0.0, Admission(8), [].append, lambda job: None)
        job.echoes = echoes
        job.submitted("x-0")
        output = output_of(1)
        output.outputs[0].append(5, text)
        output.outputs[0].finish_reason, output.finished = "stop", True
        job.put(Follower(job, 0, [Progress()]).delivery(output))
        return json.loads((await whole(job, Shape(), in_pool)).body)

    for text, echoes, num in (("short", False, 1), ("short", True, 2), ("x" * 200_000, False, 3)):
        assert asyncio.run(whole_of(text, echoes))["choices"][0]["text"] == text
        assert len(made) == num


def test_what_came_before_an_error_is_sent_before_it():
    steps = [(0, "a", None), (1, "x", None), (0, "b", "error")]
    events, aborted = events_of([steps, [(0, "never", None)]])
    *chunks, last = events
    assert last["error"]["message"] == "out of luck"
    found = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert found == [("ab", None), ("x", None)]
    assert aborted == ["x-0", "x-1"]


def test_what_is_complete_is_taken_although_the_job_has_failed_since():
    """The time to drain ended between an answer's last token and its client's turn."""

    async def run(num_prompts):
        job = Job("x", 0.0, Admission(8), lambda request_id: None, lambda job: None)
        job.streams = True
        job.claim(num_prompts, 1)
        for prompt in range(num_prompts):
            job.submitted(f"x-{prompt}")
        output = output_of(1)
        output.outputs[0].append(5, "all of it")
        output.outputs[0].finish_reason, output.finished = "stop", True
        job.put(Follower(job, 0, [Progress()]).delivery(output))
        job.fail(ApiError(503, "over"))
        (taken,) = await job.take()
        assert taken.deltas[0].text == "all of it"
        if not job.is_over:
            await job.take()

    asyncio.run(run(1))
    with pytest.raises(ApiError, match="over"):
        asyncio.run(run(2))


def test_a_job_that_is_closed_counts_no_more_whatever_comes_later():
    """A client left while another thread was about to claim its sequences, which stayed counted."""

    async def run():
        admission, aborted, closed = Admission(8), [], []
        job = Job("x", 0.0, admission, aborted.append, closed.append)
        assert admission.taken == 1
        job.close()
        assert (admission.taken, closed) == (0, [job])
        job.claim(2, 3)
        job.submitted("x-0")
        job.close()
        assert (admission.taken, aborted, closed) == (0, ["x-0"], [job])

        job = Job("y", 0.0, admission, aborted.append, closed.append)
        job.claim(2, 3)
        assert admission.taken == 6
        job.submitted("y-0")
        output = output_of(3)
        for out in output.outputs:
            out.finish_reason = "stop"
        output.finished = True
        job.put(Follower(job, 0, [Progress() for _ in range(3)]).delivery(output))
        assert admission.taken == 3
        job.close()
        assert admission.taken == 0

    asyncio.run(run())
