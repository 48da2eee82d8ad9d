"""Faults in what surrounds a run: workspace, plan, graph and stream; planted in `graph_safe`.

A fault is a function `fault(bound, spec)` that returns the `BoundOp` with something wrong. Those
of `GRAPH_FAULTS` need a graph, or a tape in its place, those of `GPU_FAULTS` a CUDA device.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from support import graph_safe
from support.fakes import CPU
from support.fault import Fault
from support.graph_safe import SPLIT, SplitAttention
from tvr.backends.torch_ref import plugin
from tvr.contract import BoundOp


def faulty(fault):
    """Return the backend `graph_safe` with the fault planted."""
    return graph_safe.backend(
        lambda bound, spec: fault.fault(bound, spec) if spec.op == fault.op else bound
    )


def _of(cls):
    """The fault of binding another kind of attention, named by its class."""

    def fault(bound, spec):
        return cls(spec).bound()

    fault.__name__ = cls.__name__
    return fault


def _around_run(bound, before=None, after=None):
    """`bound` with more done before or after each run, given its positional arguments."""

    def run(*args, **kwargs):
        if before is not None:
            args = before(*args)
        result = bound.run(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    return replace(bound, run=_signed_as(bound.run, run))


def _signed_as(right, run):
    """`run` with the signature of `right`, which tvr looks at."""
    run.__wrapped__ = right
    return run


# --- workspace --------------------------------------------------------------------------------


def divides_its_workspace_among_tokens(bound, spec):
    return replace(bound, workspace_bytes=lambda b: bound.workspace_bytes(b) // b.max_num_tokens)


def asks_for_a_fraction_of_a_byte(bound, spec):
    return replace(bound, workspace_bytes=lambda b: bound.workspace_bytes(b) / 2)


def asks_for_more_each_time(bound, spec):
    asked = []

    def workspace_bytes(bounds):
        asked.append(bounds)
        return bound.workspace_bytes(bounds) + len(asked)

    return replace(bound, workspace_bytes=workspace_bytes)


def counts_on_512_bytes(bound, spec):
    """As allocators give them, though 256 are promised."""

    def attach(workspace):
        if workspace.data_ptr() % 512:
            raise RuntimeError("misaligned address")
        bound.attach(workspace)

    return replace(bound, attach=attach)


def writes_one_element_too_many(bound, spec):
    workspace = bound.run.__self__

    def overrun(*args):
        inside = workspace.workspace
        torch.as_strided(inside, (1,), (1,), inside.storage_offset() + len(inside)).fill_(0)

    return _around_run(bound, after=overrun)


def counts_a_sequence_before_the_first(bound, spec):
    attention = bound.run.__self__

    def plan(step):
        inside = attention.workspace
        torch.as_strided(inside, (4,), (1,), inside.storage_offset() - 4).fill_(0)
        bound.plan(step)

    return replace(bound, plan=plan)


class CombinesEverySplit(SplitAttention):
    """Reads partial results of splits that this step has not computed."""

    def combined(self, live, shape):
        return torch.ones(shape, dtype=torch.bool, device=live.device)


class SharesOneScratch(SplitAttention):
    """All specs work in the workspace that was attached last."""

    scratch = None

    def attach(self, workspace):
        type(self).scratch = workspace

    def _counts(self, step):
        self.workspace = self.scratch
        return super()._counts(step)


def keeps_one_plan_for_all_specs(bound, spec):
    """Without a workspace: the plan is a variable of the module."""
    right = plugin.tvr_bind_attention_decode(spec=spec, device=CPU)

    def plan(step):
        _PLANNED["num_heads"] = spec.num_heads

    def run(q, k_cache, v_cache, step, *, scale, out, lse=None):
        result = right.run(q, k_cache, v_cache, step, scale=scale, out=out, lse=lse)
        return result if _PLANNED["num_heads"] == spec.num_heads else result.zero_()

    return BoundOp(run=run, plan=plan)


_PLANNED = {}


# --- plan -------------------------------------------------------------------------------------


def sorts_the_lengths_of_the_host(bound, spec):
    """Long sequences first, for balance; and in place."""

    def plan(step):
        step.seq_lens_cpu.sort(reverse=True)
        bound.plan(step)

    return replace(bound, plan=plan)


def tidies_up_the_table(bound, spec):
    def plan(step):
        step.block_table[:, -1] = -1
        bound.plan(step)

    return replace(bound, plan=plan)


def counts_splits_in_place(bound, spec):
    def plan(step):
        bound.plan(step)
        step.seq_lens.add_(SPLIT - 1).floor_divide_(SPLIT)

    return replace(bound, plan=plan)


def consumes_its_plan(bound, spec):
    attention = bound.run.__self__
    at = 3 if spec.op == "attention_decode" else 5

    def consume(*args):
        attention._counts(args[at]).zero_()

    return _around_run(bound, after=consume)


def wants_a_run_for_each_plan(bound, spec):
    state = {"ready": False}

    def plan(step):
        if state["ready"]:
            raise RuntimeError("end_forward must be called first")
        state["ready"] = True
        bound.plan(step)

    def end(*args):
        state["ready"] = False

    return replace(_around_run(bound, after=end), plan=plan)


class ReadsLengthsOfTheHost(SplitAttention):
    """Takes the lengths from `seq_lens_cpu`, which are bounds in a graph."""

    def decode(self, q, k_cache, v_cache, step, **kwargs):
        return super().decode(q, k_cache, v_cache, self._of_host(step), **kwargs)

    def prefill(self, q, k, v, k_cache, v_cache, step, **kwargs):
        return super().prefill(q, k, v, k_cache, v_cache, self._of_host(step), **kwargs)

    def _of_host(self, step):
        lens = torch.zeros_like(step.seq_lens)
        for s, kv_len in enumerate(step.seq_lens_cpu):
            lens[s] = kv_len
        return replace(step, seq_lens=lens)


# --- graph ------------------------------------------------------------------------------------


def launches_where_no_capture_sees_it(bound, spec):
    def run(*args, **kwargs):
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            if torch.cuda.is_available():
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            return bound.run(*args, **kwargs)

    return replace(bound, run=_signed_as(bound.run, run))


def runs_once_for_the_same_addresses(bound, spec):
    seen = {}

    def run(*args, **kwargs):
        key = tuple(x.data_ptr() for x in (*args, *kwargs.values()) if hasattr(x, "data_ptr"))
        if key not in seen:
            seen[key] = bound.run(*args, **kwargs)
        return seen[key]

    return replace(bound, run=_signed_as(bound.run, run))


def asks_the_device_for_the_longest(bound, spec):
    def before(q, k_cache, v_cache, step):
        return q, k_cache, v_cache, replace(step, max_seq_len=max(1, step.seq_lens.max().item()))

    return _around_run(bound, before=before)


def plans_in_its_run(bound, spec):
    attention = bound.run.__self__

    def before(q, k_cache, v_cache, step):
        lens = torch.tensor(step.seq_lens_cpu, dtype=torch.int32, device=q.device)
        attention.plan(replace(step, seq_lens=lens))
        return q, k_cache, v_cache, step

    return replace(_around_run(bound, before=before), plan=lambda step: None)


def waits_to_look_for_a_slot_of_minus_one(bound, spec):
    right = plugin.kv.bind_kv_write()
    return replace(right, run=right.run)


def keeps_argument(index):
    """Works on a copy of an argument, made at the first call."""

    def fault(bound, spec):
        kept = []

        def before(*args):
            if not kept:
                kept.append(args[index].clone())
            return (*args[:index], kept[0], *args[index + 1 :])

        return _around_run(bound, before=before)

    fault.__name__ = f"keeps_argument_{index}"
    return fault


class KeepsTheTable(SplitAttention):
    """Follows the block table of the first call."""

    table = None

    def _attend(self, q, k_cache, v_cache, step, *args):
        if self.table is None:
            self.table = step.block_table.clone()
        super()._attend(q, k_cache, v_cache, replace(step, block_table=self.table), *args)


def scales_by_the_largest_of_the_batch(bound, spec):
    """As a quantiser with one scale for the whole batch would."""

    def before(x, *rest):
        largest = x.abs().amax()
        return (x / largest * largest, *rest)

    return _around_run(bound, before=before)


class PlansOnce(SplitAttention):
    """Keeps the splits of the first step it was shown."""

    planned = False

    def plan(self, step):
        if not self.planned:
            super().plan(step)
        self.planned = True


class RemembersTheBatchSize(SplitAttention):
    """Holds what it finds in the workspace for a count of its own, zero or that of this graph."""

    def workspace_bytes(self, bounds):
        return super().workspace_bytes(bounds) + 4

    def attach(self, workspace):
        self.workspace = workspace[4:]
        self.last = workspace[:4].view(torch.int32)

    def _attend(self, q, k_cache, v_cache, step, seq, position, scale, out, lse):
        super()._attend(q, k_cache, v_cache, step, seq, position, scale, out, lse)
        is_known = (self.last == 0) | (self.last == len(q))
        out.mul_(2 - is_known.int())
        self.last.fill_(len(q))


# --- stream and device ------------------------------------------------------------------------


def launches_on_the_default_stream(bound, spec):
    def run(*args, **kwargs):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return bound.run(*args, **kwargs)

    return replace(bound, run=_signed_as(bound.run, run))


def launches_on_the_current_device(bound, spec):
    def before(*args):
        if args[0].device.index != torch.cuda.current_device():
            raise RuntimeError("an illegal memory access was encountered")
        return args

    return _around_run(bound, before=before)


CONTRACT_FAULTS = [
    Fault("workspace_bytes_are_a_number", "attention_decode", asks_for_a_fraction_of_a_byte),
    Fault("workspace_bytes_are_a_number", "attention_decode", asks_for_more_each_time),
    Fault(
        "writes_stay_inside_the_workspace", "attention_decode", divides_its_workspace_among_tokens
    ),
    Fault("writes_stay_inside_the_workspace", "attention_decode", counts_on_512_bytes),
    Fault("writes_stay_inside_the_workspace", "attention_decode", writes_one_element_too_many),
    Fault(
        "writes_stay_inside_the_workspace",
        "attention_prefill",
        counts_a_sequence_before_the_first,
    ),
    Fault("longer_step_leaves_nothing_behind", "attention_decode", _of(CombinesEverySplit)),
    Fault("bindings_share_no_state", "attention_decode", _of(SharesOneScratch)),
    Fault("bindings_share_no_state", "attention_decode", keeps_one_plan_for_all_specs),
    Fault("plan_writes_only_the_workspace", "attention_decode", tidies_up_the_table),
    Fault("plan_writes_only_the_workspace", "attention_prefill", counts_splits_in_place),
    Fault("plan_writes_only_the_workspace", "attention_decode", sorts_the_lengths_of_the_host),
    Fault("one_plan_serves_every_layer", "attention_decode", consumes_its_plan),
    Fault("one_plan_serves_every_layer", "attention_prefill", consumes_its_plan),
    Fault("one_plan_serves_every_layer", "attention_decode", wants_a_run_for_each_plan),
    Fault("host_sizes_may_be_bounds", "attention_decode", _of(ReadsLengthsOfTheHost)),
    Fault("host_sizes_may_be_bounds", "attention_prefill", _of(ReadsLengthsOfTheHost)),
]
GRAPH_FAULTS = [
    Fault("run_is_captured_whole", "attention_decode", launches_where_no_capture_sees_it),
    Fault("run_is_captured_whole", "rms_norm", runs_once_for_the_same_addresses),
    Fault("run_is_captured_whole", "attention_decode", asks_the_device_for_the_longest),
    Fault("run_is_captured_whole", "attention_decode", plans_in_its_run),
    Fault("run_is_captured_whole", "kv_write", waits_to_look_for_a_slot_of_minus_one),
    Fault("replay_reads_the_data_of_its_step", "silu_mul", keeps_argument(0)),
    Fault("replay_reads_the_data_of_its_step", "rope", keeps_argument(2)),
    Fault("replay_reads_the_data_of_its_step", "kv_write", keeps_argument(4)),
    Fault("replay_reads_the_data_of_its_step", "attention_decode", _of(KeepsTheTable)),
    Fault("replay_ignores_padding_rows", "rms_norm", scales_by_the_largest_of_the_batch),
    Fault("replay_ignores_padding_rows", "attention_decode", scales_by_the_largest_of_the_batch),
    Fault("replay_follows_the_lengths", "attention_decode", _of(ReadsLengthsOfTheHost)),
    Fault("replay_follows_the_lengths", "attention_prefill", _of(PlansOnce)),
    Fault("replay_plans_for_its_lengths", "attention_decode", _of(PlansOnce)),
    Fault("replay_plans_for_its_lengths", "attention_prefill", _of(PlansOnce)),
    Fault("steps_between_replays_do_no_harm", "attention_decode", _of(RemembersTheBatchSize)),
]
GPU_FAULTS = [
    Fault("run_follows_the_current_stream", "rms_norm", launches_on_the_default_stream),
    Fault("run_follows_the_current_stream", "attention_decode", launches_on_the_default_stream),
    Fault("another_device_may_be_current", "rms_norm", launches_on_the_current_device),
]
