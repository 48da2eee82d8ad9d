"""Claims that hold for every op, whatever it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tvr.conformance.inputs import make_call
from tvr.conformance.judge import same_bits
from tvr.conformance.ledger import Check, CheckFailed
from tvr.conformance.relations import same, same_outputs
from tvr.conformance.subject import UPDATED, Call
from tvr.contract import OPS, StepMeta

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.case import Case
    from tvr.conformance.subject import Subject

#: Arguments with one row for each token.
TOKEN_ARGS = frozenset(
    {"x", "residual", "q", "k", "v", "positions", "slot_mapping", "logits"}
    | {"out", "residual_out", "q_out", "k_out", "lse"}
    | {"entries", "input_ids", "rows", "seq_lens", "step_block_table", "output_positions"}
    | {"tokens", "ids", "values", "ranks"}
)
_STRIDABLE = frozenset({"x", "residual", "q", "k", "v", "logits"})
_GUARD = 64  # elements on either side; a multiple of 16 bytes in every dtype
_SENTINEL = 77
_ROW_OPS = tuple(op for op in OPS if not op.startswith("attention"))
_FLOAT_OPS = tuple(op for op in OPS if op != "prepare_step")  # those with an input of floats
_MOST_SINGLE_ROWS = 8  # tried by themselves, evenly spread


def rows_of(call: Call, rows: slice | list[int]) -> Call:
    """Return a copy of a call (of any op but attention) with some of its rows."""
    args = {
        name: value[rows].clone() if name in TOKEN_ARGS and value is not None else value
        for name, value in call.args.items()
    }
    return replace(call, args=args)


def written_rows(call: Call) -> dict[str, Tensor]:
    """Return what the call has written, one row for each token.

    Of a cache these are the tokens' slots, of a table by request those of the call.
    """
    rows = call.written
    if call.stores_in_slots:
        slots = call["slot_mapping"]
        for name in ("k_cache", "v_cache"):
            block_size = call[name].shape[2]
            rows[name] = call[name][slots // block_size, :, slots % block_size]
    for name in UPDATED & rows.keys():
        rows[name] = call[name][call["rows"]]
    return rows


def check_declared_support_is_bound(backend: Subject, case: Case) -> None:
    """The hook binds a spec if, and only if, the backend declares it."""
    for spec in (case.spec, replace(case.spec, batch_invariant=True)):
        reasons = backend.why_not(spec)
        bound = backend.bind(spec)
        if not reasons and bound is None:
            raise CheckFailed(f"declares {spec}, but the hook returned None")
        if reasons and bound is not None:
            raise CheckFailed(f"bound {spec} without declaring it: {'; '.join(reasons)}")


def check_outputs_are_returned(backend: Subject, case: Case) -> None:
    """`run` returns the very tensors it was given to fill."""
    call = make_call(case, backend.torch_device)
    result = backend.run(call)
    if problem := call.wrong_return(result):
        raise CheckFailed(problem)


def check_inputs_are_unchanged(backend: Subject, case: Case) -> None:
    """Nothing but the outputs is written."""
    call = make_call(case, backend.torch_device)
    before = {name: tensor.clone() for name, tensor in call.read.items()}
    backend.run(call)
    for name, tensor in call.read.items():
        same_bits(f"input {name}", tensor, before[name])


def check_writes_stay_inside_outputs(backend: Subject, case: Case) -> None:
    """Memory on either side of an output keeps its contents."""
    call = make_call(case, backend.torch_device)
    buffers = {}
    for name, tensor in call.written.items():
        size = tensor.numel() + 2 * _GUARD
        buffer = torch.full((size,), _SENTINEL, dtype=tensor.dtype, device=tensor.device)
        inside = buffer[_GUARD:-_GUARD].view(tensor.shape)
        inside.copy_(tensor)
        buffers[name] = buffer
        call = call.replace(**{name: inside})
    backend.run(call)
    for name, buffer in buffers.items():
        guards = torch.cat([buffer[:_GUARD], buffer[-_GUARD:]])
        same_bits(f"guard bands of {name}", guards, torch.full_like(guards, _SENTINEL))


def check_strided_inputs_are_read_right(backend: Subject, case: Case) -> None:
    """Inputs that are slices of wider rows, each of its own or all of one qkv buffer, are equal."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    for place in (_each_in_wider_rows, _side_by_side):
        strided = make_call(case, backend.torch_device)
        names = [name for name in strided.read if name in _STRIDABLE]
        slices = place([strided[name] for name in names])
        strided = strided.replace(**dict(zip(names, slices, strict=True)))
        backend.run(strided)
        same_outputs(backend, "", strided, call)


def check_empty_batch_is_accepted(backend: Subject, case: Case) -> None:
    """A batch of no tokens raises nothing and leaves the next call right."""
    call = make_call(case, backend.torch_device)
    backend.run(call)
    backend.run(_without_tokens(make_call(case, backend.torch_device)))
    again = make_call(case, backend.torch_device)
    backend.run(again)
    same_outputs(backend, "", again, call)


def check_runs_are_bit_equal(backend: Subject, case: Case) -> None:
    """Two runs on the same inputs give the same bits."""
    first, second = (make_call(case, backend.torch_device) for _ in range(2))
    backend.run(first)
    backend.run(second)
    same_outputs(backend, "", second, first)


def check_nan_row_stays_alone(backend: Subject, case: Case) -> None:
    """A row of NaN gives NaN, and leaves every other row as it is without it."""
    clean = make_call(case, backend.torch_device)
    backend.run(clean)
    call = make_call(case, backend.torch_device)
    bad = case.num_tokens // 2
    for name, tensor in call.read.items():
        if name in _STRIDABLE:
            tensor[bad] = float("nan")
    backend.run(call)
    others = [i for i in range(case.num_tokens) if i != bad]
    wanted = written_rows(clean)
    for name, rows in written_rows(call).items():
        same(backend, call, f"other rows of {name}", rows[others], wanted[name][others])
        if rows.is_floating_point() and not rows[bad].isnan().all():
            raise CheckFailed(f"row {bad} of {name}: holds numbers, where all inputs are NaN")


def check_rows_do_not_depend_on_batch(backend: Subject, case: Case) -> None:
    """Bound as batch_invariant, a row has the same bits alone, in a part and in the whole."""
    invariant = replace(case, spec=replace(case.spec, batch_invariant=True))
    whole = make_call(invariant, backend.torch_device)
    backend.run(whole)
    wanted = written_rows(whole)
    n = case.num_tokens
    singles = sorted({*range(0, n, -(-n // _MOST_SINGLE_ROWS)), n - 1})
    parts = [slice(i, i + 1) for i in singles]
    for rows in [*parts, slice(1, n), slice(n // 2, n), slice(0, n - 1)]:
        part = rows_of(make_call(invariant, backend.torch_device), rows)
        backend.run(part)
        for name, found in written_rows(part).items():
            what = f"{name} of rows {rows.start}:{rows.stop} by themselves"
            same_bits(what, found, wanted[name][rows])


def in_wider_rows(x: Tensor) -> Tensor:
    """Return x [T, ...] as a slice of a buffer whose rows are longer, with NaN around it."""
    width = x[0].numel() if len(x) else 0
    wide = torch.full((len(x), width + 2 * _GUARD), float("nan"), dtype=x.dtype, device=x.device)
    inside = wide[:, _GUARD : _GUARD + width].view(x.shape)
    return inside.copy_(x)


def _each_in_wider_rows(tensors: list[Tensor]) -> list[Tensor]:
    return [in_wider_rows(x) for x in tensors]


def _side_by_side(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors [T, ...] as slices of one buffer: the stride of their rows is the same."""
    widths = [x.numel() // max(1, len(x)) for x in tensors]
    rows = torch.cat([x.flatten(1) for x in tensors], dim=1)
    parts = torch.split(rows, widths, dim=1)
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def _without_tokens(call: Call) -> Call:
    step: StepMeta | None = call.args.get("step")
    if step is None:
        return rows_of(call, slice(0, 0))
    empty = StepMeta(
        block_table=step.block_table[:0],
        seq_lens=step.seq_lens[:0],
        cu_seqlens_q=step.cu_seqlens_q[:1],
        num_seqs=0,
        num_tokens=0,
        max_q_len=0,
        max_seq_len=0,
        seq_lens_cpu=[],
    )
    return rows_of(call, slice(0, 0)).replace(step=empty)


def _several_rows(case: Case) -> bool:
    return case.num_tokens > 1


CHECKS = (
    Check(run=check_declared_support_is_bound, ops=OPS, of_declaration=True),
    Check(run=check_outputs_are_returned, ops=OPS),
    Check(run=check_inputs_are_unchanged, ops=OPS),
    Check(run=check_writes_stay_inside_outputs, ops=OPS),
    # A GEMM may well sum in another order for another row stride: they have checks of their own.
    Check(
        run=check_strided_inputs_are_read_right,
        ops=tuple(op for op in _FLOAT_OPS if op not in ("linear", "fused_linear")),
    ),
    Check(run=check_empty_batch_is_accepted, ops=OPS),
    Check(run=check_runs_are_bit_equal, ops=OPS, flag="deterministic"),
    Check(
        run=check_nan_row_stays_alone,
        ops=tuple(op for op in _ROW_OPS if op in _FLOAT_OPS),
        applies=_several_rows,
    ),
    Check(
        run=check_rows_do_not_depend_on_batch,
        ops=_ROW_OPS,
        flag="batch_invariant",
        applies=_several_rows,
    ),
)
