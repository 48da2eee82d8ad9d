"""Is the result of a call right, whatever its inputs? By the oracle and limits of the suite.

A result with the reference's bits is right. One that differs is held against the fp64 oracle, by
the limit that the suite has for the op. In `linear` and attention, where the oracle takes long, it
is asked only about results that are over that limit from the reference too. `lse` is not judged:
no model asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.checks_prepare import wanted_step
from tvr.conformance.checks_sample import allowed_in, kept_choice
from tvr.conformance.fault import (
    Fault,
    bounded,
    first_off,
    first_off_in_ulps,
    first_other,
    first_part_off,
    same_bits,
)
from tvr.conformance.fused_range import fused_range
from tvr.conformance.tensors import dtype_name, torch_dtype
from tvr.contract import LOGPROB_FLOOR, AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.subject import Call

#: Rows of a weight that the oracle takes at a time: all of them in fp64 would fill a device.
_WEIGHT_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One call, run twice.

    Attributes:
        call: its inputs as they were before.
        found, reference: every output of the backend and of the reference, by name.
        rounding: where the backend declares that a norm rounds: "twice" or "once".
    """

    call: Call
    found: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    rounding: str


def find_fault(t: Comparison) -> Fault | None:
    """Return the first fault in what the backend made of a call; None: it is right."""
    pairs = [(found, t.reference[name]) for name, found in t.found.items()]
    if all(bool(same_bits(*pair).all()) for pair in pairs):
        return None
    return _JUDGES[t.call.spec.op](t)


def _rms_norm(t: Comparison) -> Fault | None:
    return _norm_of(t.call["x"], t)


def _add_rms_norm(t: Comparison) -> Fault | None:
    x, residual, summed = t.call["x"], t.call["residual"], t.found["residual_out"]
    wanted = (x.double() + residual.double()).to(x.dtype).double()
    fault = first_off("residual_out", summed, wanted, 0.0, t.reference["residual_out"])
    return fault or _norm_of(summed, t)


def _norm_of(x: Tensor, t: Comparison) -> Fault | None:
    """Judge the norm of x, in half precision by the range that rounding explains."""
    weight, eps, found = t.call["weight"], t.call["eps"], t.found["out"]

    def exact(error: float) -> Tensor:
        return oracle.rms_norm(x, weight, eps, t.rounding, relative_error=error).double()

    wanted = exact(0.0)
    if found.dtype == torch.float32:
        ulps = tolerance.NORM_FP32_ULPS
        return first_off_in_ulps("out", found, wanted, ulps, t.reference["out"])
    ends = exact(-tolerance.NORM_ARITHMETIC), exact(tolerance.NORM_ARITHMETIC)
    below, above = wanted - torch.minimum(*ends), torch.maximum(*ends) - wanted
    limit = torch.where(found.double() < wanted, below, above)
    return first_off("out", found, wanted, limit, t.reference["out"])


def _rope(t: Comparison) -> Fault | None:
    # Only the rows in use: the table may have as many as the model has positions.
    table = t.call["cos_sin_cache"][t.call["positions"]]
    rows = torch.arange(len(table), device=table.device)
    for name in ("q", "k"):
        wanted, size = oracle.rope(t.call[name], rows, table)
        output, ulps, slack = f"{name}_out", tolerance.ROPE_ULPS, tolerance.ROPE_SLACK * size
        found, reference = t.found[output], t.reference[output]
        fault = first_off_in_ulps(output, found, wanted, ulps, reference, slack=slack)
        if fault is not None:
            return fault
    return None


def _kv_write(t: Comparison) -> Fault | None:
    """Judge the caches; the k that belongs there is the one that was rotated, if any was."""
    slots = t.call["slot_mapping"]
    kept = slots >= 0
    for name, new in (("k_cache", t.found.get("k_out", t.call["k"])), ("v_cache", t.call["v"])):
        wanted = t.call[name].clone()
        block_size = wanted.shape[2]
        block, offset = slots[kept] // block_size, slots[kept] % block_size
        wanted[block, :, offset] = new[kept].to(wanted.dtype)
        fault = first_other(name, t.found[name], wanted)
        if fault is not None:
            return fault
    return None


def _rope_kv_write(t: Comparison) -> Fault | None:
    return _rope(t) or _kv_write(t)


def _silu_mul(t: Comparison) -> Fault | None:
    is_fp32 = t.call.spec.dtype == "float32"
    return first_off_in_ulps(
        "out",
        t.found["out"],
        oracle.silu_mul(t.call["x"]),
        tolerance.SILU_FP32_ULPS if is_fp32 else tolerance.SILU_ULPS,
        t.reference["out"],
        at_least=tolerance.SILU_ZERO,
    )


def _argmax(t: Comparison) -> Fault | None:
    wanted = torch.tensor(oracle.argmax(t.call["logits"].cpu()), device=t.found["out"].device)
    return first_other("out", t.found["out"], wanted)


def _prepare_step(t: Comparison) -> Fault | None:
    wanted = wanted_step(t.call, t.found["step_block_table"])
    faults = (first_other(name, found, wanted[name]) for name, found in t.found.items())
    return next((fault for fault in faults if fault is not None), None)


def _sample(t: Comparison) -> Fault | None:
    found = t.found["out"]
    for i, (token, allowed) in enumerate(zip(found.tolist(), allowed_in(t.call), strict=True)):
        if token not in allowed:
            wanted = float(min(allowed))
            return Fault(output="out", index=(i,), found=float(token), wanted=wanted, limit=0.0)
    wanted_tables = kept_choice(t.call, found)
    faults = (first_other(name, t.found[name], table) for name, table in wanted_tables.items())
    return next((fault for fault in faults if fault is not None), None)


def _top_logprobs(t: Comparison) -> Fault | None:
    k = t.found["ids"].shape[1] - 1
    device = t.found["ids"].device
    is_sound = t.call["logits"].float().amax(dim=-1).isfinite()
    exact = oracle.top_logprobs(t.call["logits"].cpu(), t.call["tokens"].cpu(), k)
    for name, wanted in (("ids", exact.ids), ("ranks", exact.ranks)):
        # A row whose largest logit is not finite means nothing.
        sound = is_sound if name == "ranks" else is_sound[:, None]
        right = torch.where(sound, wanted.to(device), t.found[name])
        fault = first_other(name, t.found[name], right)
        if fault is not None:
            return fault
    values = exact.values.clamp(min=LOGPROB_FLOOR).to(device)
    limit = tolerance.logprob_limit(values)
    return first_off("values", t.found["values"], values, limit, t.reference["values"])


def _linear(t: Comparison) -> Fault | None:
    x, weight, bias = t.call["x"], t.call["weight"], t.call["bias"]
    found, reference = t.found["out"], t.reference["out"]
    dtype = dtype_name(found)  # the spec's out_dtype, if it has one
    in_all = tolerance.frobenius_limit(dtype, x.shape[1])

    def judge(wanted: Tensor, plain: Tensor) -> Fault | None:
        in_row = _in_part(in_all, plain, wanted)
        error, largest = _largest(plain.double() - wanted, dtype), _largest(wanted, dtype)
        single = tolerance.max_error_limit(dtype, error, largest)
        return first_part_off("out", found, wanted, in_row, reference, "row") or first_off(
            "out", found, wanted, single, reference
        )

    if judge(reference.double(), reference) is None:
        return None
    products = [oracle.linear(x, rows, None) for rows in weight.split(_WEIGHT_ROWS)]
    wanted = torch.cat(products, dim=1)
    if bias is not None:
        wanted += bias.double()
    return judge(wanted, oracle.low_precision_linear(x, weight, bias, found.dtype))


def _fused_linear(t: Comparison) -> Fault | None:
    found = t.found["out"]
    right = fused_range(t.call, t.rounding)
    below, above = right.wanted - right.low, right.high - right.wanted
    limit = torch.where(found.double() < right.wanted, below, above)
    return first_off("out", found, right.wanted, limit, t.reference["out"])


def _attention(t: Comparison) -> Fault | None:
    edges = t.call["step"].cu_seqlens_q.tolist()
    for s, (start, end) in enumerate(pairwise(edges)):
        rows = slice(start, end)
        if not bool(same_bits(t.found["out"][rows], t.reference["out"][rows]).all()):
            fault = _attended(t, s, rows)
            if fault is not None:
                return replace(fault, index=(start + fault.index[0], *fault.index[1:]))
    return None


def _attended(t: Comparison, s: int, rows: slice) -> Fault | None:
    """Judge sequence s by both rules of tolerance.py; the fault's index counts from its row 0."""
    spec = t.call.spec
    assert isinstance(spec, AttentionSpec)
    found, reference = t.found["out"][rows], t.reference["out"][rows]
    kv_len = t.call["step"].seq_lens_cpu[s]

    def judge(wanted: Tensor, plain: Tensor, score: float) -> Fault | None:
        limit = tolerance.attention_limit(spec.dtype, kv_len, score)
        error, largest = _largest(plain.double() - wanted, spec.dtype), _largest(wanted, spec.dtype)
        single = tolerance.max_error_limit(spec.dtype, error, largest, score)
        whole = [x.unsqueeze(0) for x in (found, wanted, reference)]
        in_all = _in_part(limit, plain.unsqueeze(0), whole[1])
        fault = first_part_off("out", whole[0], whole[1], in_all, whole[2], "sequence")
        if fault is not None:
            return replace(fault, index=fault.index[1:])
        return first_off("out", found, wanted, single, reference)

    if judge(reference.double(), reference, 0.0) is None:
        return None
    q = t.call["q"][rows].cpu()
    k, v = (_tokens(t.call, name, s, kv_len) for name in ("k_cache", "v_cache"))
    exact = oracle.attention(spec, t.call["scale"], q, k, v)
    plain = oracle.low_precision_attention(spec, t.call["scale"], q, k, v)
    return judge(exact.out.to(found.device), plain.to(found.device), exact.largest_score)


def _tokens(call: Call, name: str, s: int, kv_len: int) -> Tensor:
    """Return what a cache holds of sequence s [kv_len, KVH, D], on the CPU."""
    cache: Tensor = call[name]
    blocks = call["step"].block_table[s, : -(-kv_len // cache.shape[2])].long()
    return cache[blocks].transpose(1, 2).flatten(0, 1)[:kv_len].cpu()  # from [n, bs, KVH, D]


def _in_part(limit: float, plain: Tensor, wanted: Tensor) -> Tensor:
    """Return the largest relative Frobenius error of each part [parts, ...].

    Large numbers that cancel leave their error in a small sum. In fp32 it may be over `limit`;
    then a plain computation has it too. The rounding of half precision is far above it.
    """
    limits = torch.full((len(wanted),), limit, dtype=torch.float64, device=wanted.device)
    if plain.dtype != torch.float32:
        return limits
    error, size = (
        torch.linalg.vector_norm(x.nan_to_num(0.0).flatten(1), dim=1)
        for x in (plain.double() - wanted, wanted)
    )
    relative = (error / size).nan_to_num(0.0)
    return torch.maximum(limits, tolerance.MAX_ERROR_FACTOR * relative)


def _largest(x: Tensor, dtype: str) -> float:
    """Return the largest |x|, NaNs left out and infinities as the largest numbers of `dtype`."""
    sizes = bounded(x, torch_dtype(dtype)).abs().nan_to_num(0.0)
    return sizes.max().item() if sizes.numel() else 0.0


_JUDGES: dict[str, Callable[[Comparison], Fault | None]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "kv_write": _kv_write,
    "rope_kv_write": _rope_kv_write,
    "attention_decode": _attention,
    "attention_prefill": _attention,
    "silu_mul": _silu_mul,
    "linear": _linear,
    "fused_linear": _fused_linear,
    "argmax": _argmax,
    "prepare_step": _prepare_step,
    "sample": _sample,
    "top_logprobs": _top_logprobs,
}
