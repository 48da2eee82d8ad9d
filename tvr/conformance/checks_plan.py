"""Claims about `plan`, which is called once a step, before the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tvr.conformance.accuracy import require_right
from tvr.conformance.binding import step_of
from tvr.conformance.bounds import exact
from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check, CheckFailed
from tvr.contract import OPS

if TYPE_CHECKING:
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject

_NUM_LAYERS = 3


def check_plan_writes_only_the_workspace(backend: Subject, case: Case) -> None:
    """plan leaves the step's arrays, and every tensor of the run, as they are."""
    call = make_call(case, backend.torch_device)
    step = step_of(call)
    arrays = {n: getattr(step, n) for n in ("block_table", "seq_lens", "cu_seqlens_q")}
    tensors = call.read | call.written | arrays
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    lens = list(step.seq_lens_cpu)
    binding = backend.binding(case.spec, exact(step))
    backend.with_runner(lambda call: binding.plan(step)).run(call)
    for name, tensor in tensors.items():
        same_bits(f"{name}, after plan,", tensor, before[name])
    if list(step.seq_lens_cpu) != lens:
        raise CheckFailed(f"plan changed seq_lens_cpu from {lens} to {list(step.seq_lens_cpu)}")


def check_one_plan_serves_every_layer(backend: Subject, case: Case) -> None:
    """The last plan holds for each layer of its step, with other caches and rows."""
    binding = backend.binding(case.spec, exact(step_of(make_call(case, backend.torch_device))))
    for layer in range(1, _NUM_LAYERS):  # the first is what every other check runs

        def step_with_call_at(call: Call, at: int = layer) -> None:
            # Where another op fails, a step ends behind its plan, and the next one is planned.
            for _ in range(2):
                binding.plan(step_of(call))
            for i in range(_NUM_LAYERS):
                binding.run(call if i == at else _another_layer(call))

        require_right(backend.with_runner(step_with_call_at), case)


def _another_layer(call: Call) -> Call:
    """Return a call of the same step with other numbers, and outputs and caches of its own."""
    tensors = {n: a for n, a in call.args.items() if isinstance(a, torch.Tensor)}
    numbers = {n: -a for n, a in tensors.items() if a.is_floating_point()}
    return replace(call, args=call.args | {n: a.clone() for n, a in tensors.items()} | numbers)


def needs_plan(backend: Subject, case: Case) -> list[str]:
    """Return why there is no plan to check."""
    return backend.lacks(case.spec, "plan")


CHECKS = (
    Check(run=check_plan_writes_only_the_workspace, ops=OPS, needs=needs_plan),
    Check(run=check_one_plan_serves_every_layer, ops=OPS, needs=needs_plan),
)
