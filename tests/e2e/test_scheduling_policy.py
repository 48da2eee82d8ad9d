"""A scheduling policy of one's own, plugged into the engine."""

from __future__ import annotations

import pytest

from support.engines import engine, prompts_of, save_shape
from support.policies import RandomPolicy
from tvr import SamplingParams
from tvr.core import FirstComeFirstServed, PriorityFirst, ShortestPromptFirst
from tvr.errors import ConfigError, PolicyError

TIGHT = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


def finished_order(llm) -> list[str]:
    order = []
    while llm.has_unfinished_requests():
        order += [output.request_id for output in llm.step() if output.finished]
    return order


@pytest.mark.parametrize(
    "make_policy", [ShortestPromptFirst, PriorityFirst, lambda: RandomPolicy(3)]
)
def test_tokens_do_not_depend_on_the_policy(path, make_policy):
    prompts, params = prompts_of([60, 5, 33, 90, 12, 47, 8, 70]), SamplingParams(max_tokens=24)
    with engine(path, **TIGHT) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with engine(path, **TIGHT, scheduling_policy=make_policy()) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_are_served_in_the_order_of_the_policy(path, lag):
    prompts = dict(zip("abc", prompts_of([40, 20, 30]), strict=True))
    settings = {**TIGHT, "max_num_seqs": 1, "max_lag": lag}
    with engine(path, **settings, scheduling_policy=ShortestPromptFirst()) as llm:
        for name, prompt in prompts.items():
            llm.add_request(name, prompt, SamplingParams(max_tokens=4))
        assert finished_order(llm) == ["b", "c", "a"]
    with engine(path, **settings, scheduling_policy=PriorityFirst()) as llm:
        for priority, (name, prompt) in zip((3, 2, 1), prompts.items(), strict=True):
            llm.add_request(name, prompt, SamplingParams(max_tokens=4), priority=priority)
        assert finished_order(llm) == ["c", "b", "a"]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_policy_that_fails_loses_no_request(path, lag):
    class Failing(FirstComeFirstServed):
        num_calls = 0

        def prefill_budget(self, num_tokens, num_decodes):
            self.num_calls += 1
            if self.num_calls == 3:
                raise RuntimeError("oops")
            return num_tokens

    prompts, params = prompts_of([60, 5, 33, 90]), SamplingParams(max_tokens=12)
    with engine(path, **TIGHT) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with engine(path, **TIGHT, max_lag=lag, scheduling_policy=Failing()) as llm:
        for index, prompt in enumerate(prompts):
            llm.add_request(str(index), prompt, params)
        outputs, errors = {}, []
        while llm.has_unfinished_requests():
            try:
                outputs.update((output.request_id, output) for output in llm.step())
            except PolicyError as error:
                errors.append(str(error))
        assert len(errors) == 1
        assert "Failing: prefill_budget raised RuntimeError: oops" in errors[0]
        assert [outputs[str(i)].outputs[0].token_ids for i in range(4)] == expected


def test_what_is_no_policy_is_refused_before_anything_is_loaded(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"scheduling_policy = .* is a class, not an object of it"),
        engine(tmp_path / "no model here", scheduling_policy=ShortestPromptFirst),
    ):
        pass
