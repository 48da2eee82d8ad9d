"""The host prepares and sends off step n + 1 while the device computes step n."""

from __future__ import annotations

import threading

import pytest

from support import graph_safe
from support.engines import save_text_model
from support.graphed import graphed, roomy
from tvr import SamplingParams

PROMPTS = [[7, 8, 9], [20] * 70, [31, 32]]  # one of them takes two steps to read
KINDS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 1},
    "log-probabilities": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "stop strings": {"temperature": 0.0, "stop": ["such a text never comes"]},
    "stop tokens": {"temperature": 0.0, "stop_token_ids": [3, 4]},
    "rules": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [3], "logit_bias": {5: 0.5}},
    "bad words": {"temperature": 0.0, "bad_words": ["no", "never"]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def with_graphs(checkpoint):
    with graphed(checkpoint, graph_safe.backend, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def without_graphs(checkpoint):
    with roomy(checkpoint, graph_safe.backend, enable_prefix_caching=False) as llm:
        yield llm


class SlowDevice:
    """Ends no step of an engine before the next one is sent, or the host can but wait for it.

    Attributes:
        num_sent: steps so far.
        alone: those that the host waited for with no other one sent.
    """

    def __init__(self, llm, monkeypatch):
        self.num_sent, self.alone = 0, []
        self._waited_for = -1
        self._change = threading.Condition()
        self._start = llm._runner._start
        monkeypatch.setattr(llm._runner, "_start", self._send)

    def _send(self, step):
        with self._change:
            number = self.num_sent
            self.num_sent += 1
            self._change.notify_all()

        def compute():
            result = step()
            with self._change:
                assert self._change.wait_for(lambda: self._is_over(number), timeout=60)
                if self.num_sent == number + 1:
                    self.alone.append(number)
            return result

        pending = self._start(compute)

        def wait():
            with self._change:
                self._waited_for = number
                self._change.notify_all()
            return pending()

        return wait

    def _is_over(self, number):
        return self.num_sent > number + 1 or self._waited_for == number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["with_graphs", "without_graphs"])
def test_every_step_but_the_last_has_the_next_one_behind_it(engine, kind, request, monkeypatch):
    llm = request.getfixturevalue(engine)
    llm._runner.counts.clear()
    device = SlowDevice(llm, monkeypatch)
    params = {"ignore_eos": True, **KINDS[kind]}
    llm.generate(PROMPTS, [SamplingParams(max_tokens=n, **params) for n in (3, 8, 5)])
    assert device.num_sent > 8
    assert device.alone == [device.num_sent - 1]
    ways = {way for way, num_steps in llm._runner.counts.items() if num_steps}
    assert ways == {"graph" if engine == "with_graphs" else "eager"}


def test_a_stop_string_costs_a_step_that_was_sent_and_no_wait(with_graphs, monkeypatch):
    """When it is found, the next step of its request is on the device already."""
    llm, params = with_graphs, {"temperature": 0.0, "max_tokens": 9}
    (whole,) = llm.generate([PROMPTS[0]], SamplingParams(**params))
    text = whole.outputs[0].text
    device = SlowDevice(llm, monkeypatch)
    stop = text[len(text) // 2 :][:3]
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(**params, stop=[stop]))
    assert output.outputs[0].finish_reason == "stop"
    assert device.num_sent == len(output.outputs[0].token_ids) + 1
    assert device.alone == [device.num_sent - 1]


def test_a_processor_in_python_has_the_host_wait_for_each_token(with_graphs, monkeypatch):
    """It is given the tokens so far. Others run ahead beside it."""
    device = SlowDevice(with_graphs, monkeypatch)
    params = SamplingParams(
        max_tokens=5, ignore_eos=True, logits_processors=[lambda ids, logits: logits]
    )
    with_graphs.generate([PROMPTS[0]], params)
    assert device.alone == list(range(5))
    with_graphs.generate(PROMPTS[:2], [params, SamplingParams(max_tokens=9, ignore_eos=True)])
    assert len(device.alone) == 5 + 1


def test_without_lag_nothing_runs_ahead(checkpoint, monkeypatch):
    with roomy(checkpoint, graph_safe.backend, max_lag=0) as llm:
        device = SlowDevice(llm, monkeypatch)
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert device.alone == list(range(5))
