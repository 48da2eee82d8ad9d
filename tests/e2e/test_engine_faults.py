"""Faults and interrupts at every point of a step, and a closed engine."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from support.engines import (
    all_blocks_came_back,
    delays,
    engine,
    greedy,
    prompts_of,
    save_shape,
    tokens_of,
)
from tvr import hookimpl
from tvr.contract import BackendInfo, BoundOp, Box
from tvr.core import engine as engine_module
from tvr.core.request import Request
from tvr.core.runner import ModelRunner
from tvr.core.scheduler import Scheduler
from tvr.errors import ConfigError

PROMPTS = prompts_of([20, 33])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    with engine(checkpoint) as llm:
        return tokens_of(llm.generate(PROMPTS, greedy(12)))


@pytest.fixture(params=[0, 1], ids=["lag0", "lag1"])
def llm(checkpoint, request, monkeypatch):
    with delays(monkeypatch), engine(checkpoint, max_lag=request.param) as llm:
        yield llm


def raise_at(patch, owner, name, error, call, *, after=False):
    """Let call number `call` of `owner.name` raise, before or after it did its work."""
    function = getattr(owner, name)
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) != call:
            return function(*args, **kwargs)
        if after:
            function(*args, **kwargs)
        raise error

    patch.setattr(owner, name, failing)
    return calls


POINTS = [
    (Scheduler, "schedule"),
    (engine_module, "pack_step"),
    (ModelRunner, "submit"),
    (Scheduler, "update_columns"),
    (Request, "apply"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), POINTS, ids=[name for _, name in POINTS])
def test_an_interrupted_engine_goes_on(llm, expected, monkeypatch, owner, name, after):
    """The scheduler went on counting a step that the engine had lost, and refused all others."""
    for call in (1, 2, 5):
        llm.add_request("other", PROMPTS[1], greedy(60))
        with monkeypatch.context() as patch:
            calls = raise_at(patch, owner, name, KeyboardInterrupt, call, after=after)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, greedy(12))
            assert len(calls) >= call
        (other,) = llm.step()
        assert other.finished
        assert "interrupted" in other.outputs[0].error
        assert not llm.has_unfinished_requests()
        assert tokens_of(llm.generate(PROMPTS, greedy(12))) == expected
        assert all_blocks_came_back(llm)


def test_an_interrupt_while_waiting_for_the_device_loses_nothing(llm, expected, monkeypatch):
    """It is where an interrupt mostly comes."""
    submit = ModelRunner.submit
    waits = []

    def interrupted(self, *args):
        pending = submit(self, *args)

        def wait():
            waits.append(1)
            if len(waits) in (1, 4, 5):
                raise KeyboardInterrupt
            return pending()

        return wait

    monkeypatch.setattr(ModelRunner, "submit", interrupted)
    for i, prompt in enumerate(PROMPTS):
        llm.add_request(str(i), prompt, greedy(12))
    outputs = {}
    num_interrupts = 0
    while llm.has_unfinished_requests():
        try:
            outputs.update({o.request_id: o for o in llm.step()})
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 3
    assert tokens_of([outputs["0"], outputs["1"]]) == expected
    assert all_blocks_came_back(llm)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (ModelRunner, "_run", RuntimeError("out of\nluck")),
        (ModelRunner, "_run", SystemExit("out of luck")),
        (ModelRunner, "submit", RuntimeError("out of luck")),
        (engine_module, "pack_step", RuntimeError("out of luck")),
    ],
    ids=["run", "exit", "submit", "pack_step"],
)
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(
    llm, expected, monkeypatch, owner, name, error
):
    """Whoever wrote the op that failed is told where."""
    assert llm.last_failure is None
    for call in (1, 4):
        with monkeypatch.context() as patch:
            raise_at(patch, owner, name, error, call)
            outputs = [o.outputs[0] for o in llm.generate(PROMPTS, greedy(12))]
        assert [o.finish_reason for o in outputs] == ["error", "error"]
        for output, tokens in zip(outputs, expected, strict=True):
            assert "out of luck" in output.error
            assert "\n" not in output.error
            assert output.token_ids == tokens[: call - 1]
        assert "in failing" in llm.last_failure
        assert all_blocks_came_back(llm)
        assert tokens_of(llm.generate(PROMPTS, greedy(12))) == expected


@pytest.mark.parametrize("name", ["_run", "submit"])
def test_a_failed_step_keeps_no_tensor(llm, monkeypatch, name):
    """Out of memory, say: what the step took must be there for the next one."""
    kept = []

    def failing(self, *args):
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ModelRunner, name, failing)
    gc.disable()
    try:
        llm.generate(PROMPTS, greedy(4))
    finally:
        gc.enable()
    assert kept
    assert [ref() for ref in kept] == [None] * len(kept)


def test_a_failed_step_leaves_requests_of_other_steps_alone(llm, expected, monkeypatch):
    with monkeypatch.context() as patch:
        raise_at(patch, ModelRunner, "_run", RuntimeError("out of luck"), 3)
        llm.add_request("early", PROMPTS[0], greedy(60))
        outputs = {}
        while "early" not in outputs or not outputs["early"].finished:
            outputs.update({o.request_id: o for o in llm.step()})
        llm.add_request("late", PROMPTS[1], greedy(12))
        while llm.has_unfinished_requests():
            outputs.update({o.request_id: o for o in llm.step()})
    assert outputs["early"].outputs[0].finish_reason == "error"
    assert outputs["late"].outputs[0].token_ids == expected[1]
    assert all_blocks_came_back(llm)


def test_a_closed_engine_ends_its_requests_and_takes_no_more(checkpoint):
    with engine(checkpoint) as llm:
        llm.add_request("x", PROMPTS[0], greedy(60))
        stream = llm.stream(PROMPTS[1], greedy(60))
        last = next(stream)
    (output,) = llm.step()
    for ended in (output, *stream, last):
        assert ended.finished
        assert ended.outputs[0].finish_reason == "abort"
    assert not llm.has_unfinished_requests()
    for use in (llm.generate, llm.chat_prompt, lambda p: llm.add_request("y", p)):
        with pytest.raises(ConfigError):
            use(PROMPTS[0])


def test_a_closed_engine_keeps_neither_model_nor_pool(checkpoint):
    """The next engine may need the memory while a name still refers to the closed one."""
    with engine(checkpoint) as llm:
        llm.generate(PROMPTS, greedy(4))
        parts = (llm._runner._kv_cache.layers[0][0], llm._runner._model)
        alive = [weakref.ref(part) for part in parts]
        del parts
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    llm.close()  # again does no harm


class BrokenNorm:
    """A backend whose kernel fails when it runs."""

    @hookimpl
    def tvr_backend_info(self):
        box = Box(dtypes=["float32"], devices=["cpu", "cuda"])
        return BackendInfo(name="broken", abi=(1, 0), ops={"rms_norm": [box]})

    @hookimpl
    def tvr_bind_rms_norm(self, spec, device):
        def run(x, weight, *, eps, out):
            raise RuntimeError("no such\nwarp")

        return BoundOp(run=run)


def test_a_failing_kernel_is_named_with_its_backend(checkpoint):
    with engine(checkpoint, plugins=[BrokenNorm()]) as llm:
        (output,) = llm.generate(PROMPTS[:1], greedy(4))
        message = "step 0 failed in rms_norm of backend 'broken': RuntimeError: no such warp"
        assert output.outputs[0].error == message
        assert "no such\nwarp" in llm.last_failure
