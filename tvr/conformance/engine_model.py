"""A tiny Llama whose ops come from the backend under test, where it has them.

What it has not comes from the reference backend, as in an engine with the backend put first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any

import torch

from tvr.conformance.ledger import CheckFailed
from tvr.conformance.model_spec import ModelSpec, op_specs
from tvr.conformance.subject import Subject
from tvr.contract import ENTRY_POINT_GROUP, Bounds
from tvr.core.chunk_graphs import padded
from tvr.core.config import ModelConfig
from tvr.core.llama import LlamaForCausalLM
from tvr.core.ops import OpTable
from tvr.core.parameters import Weights
from tvr.core.plugins import BackendManager, PluginConfig
from tvr.core.runner import on_device
from tvr.core.step_ops import StepOps

if TYPE_CHECKING:
    from tvr.conformance.case import Case

REFERENCE = "torch"

#: Room for the largest step of the engine checks.
BOUNDS = Bounds(max_num_seqs=8, max_num_tokens=256, max_seq_len=256, max_q_len=256)


def reference_for(backend: Subject) -> Subject:
    """Return the reference backend on the device of `backend`."""
    return Subject(_manager(backend).require(REFERENCE), backend.device)


def op_table(backend: Subject) -> OpTable:
    """Return a table that asks `backend` first, and the reference for what it has not."""
    manager = _manager(backend)
    # Loaded and configured already. A broken copy of the reference takes its place.
    manager.known[backend.info.name] = backend.backend
    return OpTable(manager, backend.device, backend=backend.info.name)


def _manager(backend: Subject) -> BackendManager:
    """Return a manager of the reference alone: of what else is installed, a part may be broken."""
    entry_points = distribution("tvr").entry_points.select(group=ENTRY_POINT_GROUP)
    reference = entry_points[REFERENCE].load()
    return BackendManager(PluginConfig(), plugins=[reference], device=backend.device, installed=())


def model_config(spec: ModelSpec) -> ModelConfig:
    """Return the model's shape as core knows it."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=BOUNDS.max_seq_len,
        dtype=spec.dtype,
    )


def random_weights(case: Case, spec: ModelSpec) -> Weights:
    """Return the case's weights on the CPU, of a size that keeps activations near one."""
    g, config = case.generator(), model_config(spec)
    weights = Weights.empty(config, spec.dtype, "cpu")
    for name, slot in weights.slots(config):
        drawn = torch.randn(slot.shape, generator=g)
        slot.copy_(
            1 + drawn / 10 if name.endswith("norm.weight") else drawn * slot.shape[-1] ** -0.5
        )
    return weights


def converted(weights: Weights, config: ModelConfig, dtype: str, device: torch.device) -> Weights:
    """Return a copy of `weights` in `dtype` on `device`."""
    copy = Weights.empty(config, dtype, device)
    for (_, slot), (_, given) in zip(copy.slots(config), weights.slots(config), strict=True):
        slot.copy_(given)
    return copy


class TinyModel:
    """The model, with its ops bound and its workspaces allocated.

    Args:
        backend: serves what it declares.
        spec: the model's shape.
        weights: as `random_weights` gives them; of any dtype.

    Attributes:
        spec, config: the model's shape.
        facts, device: where it runs, as hooks see it and as torch does.
        ops: who serves what.
        llama: the graph.
        step_ops: what is called around its layers.

    Raises:
        CheckFailed: the backend declares an op of the model and does not serve it.
    """

    def __init__(self, backend: Subject, spec: ModelSpec, weights: Weights) -> None:
        self.spec, self.config = spec, model_config(spec)
        self.facts, self.device = backend.device, backend.torch_device
        self.ops = op_table(backend)
        with self.on_device():
            self.llama = LlamaForCausalLM(
                self.config,
                converted(weights, self.config, spec.dtype, self.device),
                self.ops,
                block_size=spec.block_size,
                batch_invariant=spec.batch_invariant,
                max_position=BOUNDS.max_seq_len,
            )
            self.step_ops = StepOps.bind(
                self.ops,
                dtype=spec.dtype,
                block_size=spec.block_size,
                vocab_size=spec.vocab_size,
                batch_invariant=spec.batch_invariant,
            )
            _refuse_to_fall_through(backend, spec, self.ops)
            self.ops.allocate(padded(BOUNDS))

    def on_device(self) -> AbstractContextManager[Any]:
        """Return the context in which torch allocates and launches as an engine does."""
        return on_device(self.device, self.ops.stream)


def _refuse_to_fall_through(backend: Subject, spec: ModelSpec, ops: OpTable) -> None:
    """Refuse to test the reference in place of an op that the backend declares."""
    for op_spec in op_specs(spec):
        if backend.why_not(op_spec):
            continue
        (explained,) = ops.explain_ops([op_spec])
        mine = next(b for b in explained["backends"] if b["name"] == backend.info.name)
        if mine["status"] == "passed over":
            raise CheckFailed(f"does not serve {op_spec}: {'; '.join(mine['reasons'])}")
