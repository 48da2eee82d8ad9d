"""Running a backend under test as an engine with that one backend would."""

from __future__ import annotations

import torch

from support.fakes import CPU, GPU, fake
from support.specs import spec_of
from tvr.conformance.subject import Call, Subject
from tvr.contract import BoundOp


def test_a_backend_with_a_stream_of_its_own_is_run_on_it(monkeypatch):
    log = []

    class Using:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            log.append(f"enter {self.stream}")

        def __exit__(self, *exc):
            log.append(f"leave {self.stream}")

    monkeypatch.setattr(torch.cuda, "stream", Using)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))

    def bind(spec, device):
        return BoundOp(
            run=lambda logits, *, out: log.append("run"), plan=lambda s: log.append("plan")
        )

    backend = fake("a", ["argmax"], bind={"argmax": bind}, stream=lambda device: "its own")
    call = Call(spec=spec_of("argmax"), args={"logits": torch.zeros(2, 100), "out": torch.zeros(2)})
    Subject(backend, GPU).run(call)
    assert log == ["synchronize", "enter its own", "plan", "run", "leave its own", "synchronize"]


def test_an_op_is_bound_once_for_each_spec_as_an_engine_does():
    bind = {"argmax": lambda spec, device: BoundOp(run=lambda logits, *, out: out)}
    backend = fake("a", ["argmax"], bind=bind)
    subject = Subject(backend, CPU)
    call = Call(spec=spec_of("argmax"), args={"logits": torch.zeros(2, 100), "out": torch.zeros(2)})
    for _ in range(3):
        assert subject.run(call) is call["out"]
    assert backend.asked == [call.spec]
