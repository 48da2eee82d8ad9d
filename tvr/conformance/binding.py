"""An op bound for one spec with a workspace of its own, whose plan and run can be called apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from tvr.conformance.ledger import CheckFailed
from tvr.conformance.row_tables import as_run_takes_them
from tvr.conformance.workspace import Workspace
from tvr.contract import PROTOCOLS, BoundOp, Bounds, LinearSpec, StepMeta

if TYPE_CHECKING:
    from tvr.conformance.subject import Call


#: Ops of which each row is another sequence of the step.
ROWS_ARE_SEQUENCES = frozenset({"prepare_step", "sample", "top_logprobs"})


class Binding:
    """A bound op, attached to a workspace for the largest step of `bounds`.

    Attributes:
        bound: what the bind hook returned.
        workspace: None: it wants none.

    Raises:
        CheckFailed: `workspace_bytes` returned no number of bytes.
    """

    def __init__(self, bound: BoundOp, bounds: Bounds, device: torch.device) -> None:
        self.bound = bound
        self.workspace: Workspace | None = None
        if bound.attach is not None:
            self.workspace = Workspace(workspace_bytes(bound, bounds), device)
            bound.attach(self.workspace.inside)

    @property
    def num_bytes(self) -> int:
        """Size of the workspace."""
        return 0 if self.workspace is None else len(self.workspace.inside)

    def plan(self, step: StepMeta) -> None:
        """Run the op's plan, if it has one."""
        if self.bound.plan is not None:
            self.bound.plan(step)

    def prepare(self, call: Call) -> Callable[[], object]:
        """Return a function that runs `call`, all that is done once at load being done."""
        op, args = call.spec.op, as_run_takes_them(call.args)
        if isinstance(call.spec, LinearSpec):
            pair = args.pop("weight"), args.pop("bias")
            args["packed"] = pair if self.bound.pack is None else self.bound.pack(*pair)
        parameters = list(inspect.signature(PROTOCOLS[op].__call__).parameters.values())[1:]
        positional = [args.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        return lambda: self.bound.run(*positional, **args)

    def run(self, call: Call) -> object:
        """Run `call`, planned before, and return what `run` returned."""
        return self.prepare(call)()

    def __call__(self, call: Call) -> object:
        """Plan and run `call`, as a step of one layer."""
        self.plan(step_of(call))
        return self.run(call)


def workspace_bytes(bound: BoundOp, bounds: Bounds) -> int:
    """Return the bytes of workspace that an op wants; 0 if it has no `workspace_bytes`."""
    if bound.workspace_bytes is None:
        return 0
    num_bytes = bound.workspace_bytes(bounds)
    if not isinstance(num_bytes, int) or num_bytes < 0:
        raise CheckFailed(
            f"workspace_bytes returned {num_bytes!r} for {bounds}; it must return a number of bytes"
        )
    return num_bytes


def step_of(call: Call) -> StepMeta:
    """Return a call's step; of a call that has none, that of one sequence of its rows.

    Where each row is another sequence, it is that of as many decodes.
    """
    step: StepMeta | None = call.args.get("step")
    if step is not None:
        return step
    rows = next(iter(call.read.values()))
    num_tokens, device = len(rows), rows.device
    lens = [num_tokens] if num_tokens else []
    if call.spec.op in ROWS_ARE_SEQUENCES:
        lens = [1] * num_tokens
    return StepMeta(
        block_table=torch.zeros(len(lens), num_tokens, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device),
        num_seqs=len(lens),
        num_tokens=num_tokens,
        max_q_len=max(lens, default=0),
        max_seq_len=max(lens, default=0),
        seq_lens_cpu=lens,
    )
