"""Claims about the workspace that core gives to an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from tvr.conformance.accuracy import require_right
from tvr.conformance.attending import BOTH
from tvr.conformance.binding import step_of, workspace_bytes
from tvr.conformance.bounds import exact
from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.lengths import fewer_rows, longest_everywhere, turned
from tvr.contract import OPS, Bounds

if TYPE_CHECKING:
    from tvr.conformance.binding import Binding
    from tvr.conformance.case import Case
    from tvr.conformance.subject import Call, Subject
    from tvr.contract import OpSpec

#: Sizes that are doubled to get a spec like another that is declared just as well.
_FREE_SIZES = frozenset(
    {"num_heads", "num_kv_heads", "hidden_size", "intermediate_size", "vocab_size"}
    | {"out_features"}
)


def check_workspace_bytes_are_a_number(backend: Subject, case: Case) -> None:
    """workspace_bytes is a whole number for any bounds, and the same when asked again."""
    bound = backend.bind_declared(case.spec)
    for bounds in _some_bounds():
        num_bytes, again = (workspace_bytes(bound, bounds) for _ in range(2))
        if again != num_bytes:
            raise CheckFailed(f"workspace_bytes says {num_bytes}, then {again} for {bounds}")


def check_writes_stay_inside_the_workspace(backend: Subject, case: Case) -> None:
    """A workspace sized for a step is enough for it and for smaller ones: none goes past it."""
    bounds = exact(step_of(make_call(case, backend.torch_device)))
    binding = backend.binding(case.spec, bounds)
    for step in (case, *fewer_rows(case), case):
        require_right(backend.with_runner(binding), step)
        if binding.workspace is not None:
            binding.workspace.require_intact_bands()


def check_longer_step_leaves_nothing_behind(backend: Subject, case: Case) -> None:
    """After a step of longer sequences a step is as right as it is first of all."""
    longer = make_call(longest_everywhere(case), backend.torch_device)
    # Large scores: whatever is left of them would outweigh what is right.
    longer["q"].mul_(8)
    binding = backend.binding(case.spec, exact(step_of(longer)))

    def after_a_longer_step(call: Call) -> None:
        binding(longer)
        binding(call)

    require_right(backend.with_runner(after_a_longer_step), case)


def check_bindings_share_no_state(backend: Subject, case: Case) -> None:
    """Between plan and run, a step of another binding changes no workspace byte and no result."""
    for spec in (larger_spec(case.spec), case.spec):
        between = make_call(replace(turned(case), spec=spec), backend.torch_device)
        bounds = exact(step_of(between))
        mine, other = backend.binding(case.spec, bounds), backend.binding(spec, bounds)
        if mine.bound is other.bound:
            raise CheckFailed(
                "two calls of the bind hook returned one BoundOp, which has a plan or a workspace"
            )
        require_right(backend.with_runner(_interrupted(mine, other, between)), case)


def _interrupted(mine: Binding, other: Binding, between: Call) -> Callable[[Call], None]:
    """Return how to run a call with `between` run by another binding after its plan."""

    def run(call: Call) -> None:
        mine.plan(step_of(call))
        before = None if mine.workspace is None else mine.workspace.inside.clone()
        other(between)
        if mine.workspace is not None and before is not None:
            same_bits("workspace of another binding", mine.workspace.inside, before)
        mine.run(call)

    return run


def larger_spec(spec: OpSpec) -> OpSpec:
    """Return a spec with twice the heads or columns, which no box can tell from `spec`."""
    return replace(spec, **{n: 2 * v for n, v in vars(spec).items() if n in _FREE_SIZES})


def needs_workspace(backend: Subject, case: Case) -> list[str]:
    """Return why there is no workspace to check."""
    return backend.lacks(case.spec, "workspace_bytes")


def needs_state(backend: Subject, case: Case) -> list[str]:
    """Return why there is no state that bindings could share."""
    return backend.lacks(case.spec, "plan", "workspace_bytes")


def _can_be_longer(case: Case) -> bool:
    return longest_everywhere(case) != case


def _some_bounds() -> list[Bounds]:
    """Return bounds that can be met: no more sequences, nor a longer chunk, than tokens."""
    choices = product((1, 3, 256), (1, 17, 256, 8192), (1, 16, 130, 131072), (1, 16, 8192))
    return [
        Bounds(max_num_seqs=seqs, max_num_tokens=tokens, max_seq_len=seq_len, max_q_len=q_len)
        for seqs, tokens, seq_len, q_len in choices
        if max(seqs, q_len) <= tokens and q_len <= seq_len
    ]


CHECKS = (
    Check(run=check_workspace_bytes_are_a_number, ops=OPS, needs=needs_workspace),
    Check(run=check_writes_stay_inside_the_workspace, ops=OPS, needs=needs_workspace),
    Check(run=check_bindings_share_no_state, ops=OPS, needs=needs_state),
    Check(run=check_longer_step_leaves_nothing_behind, ops=BOTH, applies=_can_be_longer),
)
