"""Backends with one planted fault each: the reference backend with one op's `run` wrapped.

A fault is a function `fault(right, spec, a)`: `a` holds the arguments of the call by name and
`right(**changes)` makes the right call, with some arguments changed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from tvr.backends.torch_ref import attention, plugin
from tvr.contract import PROTOCOLS
from tvr.hookspecs import hookimpl


@dataclass(frozen=True)
class Fault:
    check: str  # the check that must catch it
    op: str
    fault: Callable

    @property
    def name(self) -> str:
        return f"{self.op}-{self.fault.__name__}"


def faulty(fault: Fault) -> SimpleNamespace:
    """Return the reference backend with the fault planted."""
    right_hook = getattr(plugin, f"tvr_bind_{fault.op}")
    parameters = list(inspect.signature(PROTOCOLS[fault.op].__call__).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    @hookimpl
    def bind(spec, device):
        bound = right_hook(spec=spec, device=device)
        if bound is None:
            return None

        def run(*args, **kwargs):
            a = dict(zip(names, args, strict=True)) | kwargs

            def right(**changes):
                b = a | changes
                return bound.run(*[b.pop(n) for n in names], **b)

            return fault.fault(right, spec, a)

        return replace(bound, run=run)

    hooks = {name: value for name, value in vars(plugin).items() if name.startswith("tvr_")}
    return SimpleNamespace(**hooks | {f"tvr_bind_{fault.op}": bind})


def _as_if_contiguous(x):
    strides = torch.empty(x.shape, device="meta").stride()
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


# --- every op ---------------------------------------------------------------------------------


def returns_a_copy(right, spec, a):
    return right().clone()


def scribbles_on_its_input(right, spec, a):
    right()
    a["x"][-1:] += 1
    return a["out"]


def writes_past_the_end(right, spec, a):
    out = right()
    torch.as_strided(out, (out.numel() + 8,), (1,), out.storage_offset())[-8:] = 0
    return out


def ignores_the_row_stride(right, spec, a):
    return right(x=_as_if_contiguous(a["x"]))


def fails_on_zero_rows(right, spec, a):
    if len(a["logits"]) == 0:
        raise RuntimeError("invalid configuration argument")
    return right()


def adds_noise(right, spec, a):
    out = right()
    return out.mul_(1 + torch.rand(out.shape))


def spreads_nan_to_all_rows(right, spec, a):
    out = right()
    return out.fill_(math.nan) if a["x"].isnan().any() else out


def sums_by_the_shape_of_the_batch(right, spec, a):
    weight = a["packed"][0][: a["out"].shape[1], : a["x"].shape[1]]
    return torch.mm(a["x"], weight.t(), out=a["out"])


# --- norms ------------------------------------------------------------------------------------


def _normed(x, eps):
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def casts_after_the_weight(right, spec, a):
    return a["out"].copy_(_normed(a["x"], a["eps"]) * a["weight"].float())


def adds_eps_outside_the_root(right, spec, a):
    x = a["x"].float()
    normed = x / ((x * x).mean(-1, keepdim=True).sqrt() + a["eps"])
    return a["out"].copy_(normed.to(a["x"].dtype) * a["weight"])


def squares_in_the_activation_dtype(right, spec, a):
    x = a["x"]
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + a["eps"])
    return torch.mul(normed, a["weight"], out=a["out"])


def norms_the_unrounded_sum(right, spec, a):
    total = a["x"].float() + a["residual"].float()
    a["residual_out"].copy_(total)
    a["out"].copy_(_normed(total, a["eps"]).to(a["x"].dtype) * a["weight"])
    return a["out"], a["residual_out"]


def nudges_one_element_by_one_ulp(right, spec, a):
    out = right()
    out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0, dtype=out.dtype))
    return out


def has_an_eps_of_its_own(right, spec, a):
    return right(eps=1e-6)


def reads_the_residual_twice(right, spec, a):
    torch.add(a["x"], a["residual"], out=a["residual_out"])
    total = a["x"] + a["residual"]
    a["out"].copy_(_normed(total, a["eps"]).to(a["x"].dtype) * a["weight"])
    return a["out"], a["residual_out"]


# --- rope -------------------------------------------------------------------------------------


def counts_positions_from_zero(right, spec, a):
    return right(positions=torch.arange(len(a["positions"])))


def rotates_in_the_activation_dtype(right, spec, a):
    return right(cos_sin_cache=a["cos_sin_cache"].to(a["q"].dtype).float())


def is_two_ulps_off_in_one_place(right, spec, a):
    right()
    far = torch.tensor(math.inf, dtype=a["q_out"].dtype)
    for _ in range(2):
        a["q_out"][0, 0, 0] = torch.nextafter(a["q_out"][0, 0, 0], far)
    return a["q_out"], a["k_out"]


def pairs_neighbours(right, spec, a):
    half = a["cos_sin_cache"].shape[1] // 2
    order = torch.arange(2 * half).view(half, 2).t().flatten()  # 0, 2, 4, ... 1, 3, 5, ...
    for name in ("q", "k"):
        out = a[f"{name}_out"]
        out.copy_(a[name])
        out[..., : 2 * half] = a[name][..., order]
    right(q=a["q_out"], k=a["k_out"])
    for name in ("q", "k"):
        out = a[f"{name}_out"]
        out[..., order] = out[..., : 2 * half].clone()
    return a["q_out"], a["k_out"]


def reads_a_half_already_written(right, spec, a):
    right()
    if a["q_out"] is a["q"]:
        a["q_out"][..., -1] += a["q_out"][..., 0]
    return a["q_out"], a["k_out"]


def writes_rows_of_the_head_count(right, spec, a):
    """As if the outputs were contiguous, which they are unless they are slices of a qkv buffer."""
    right(q_out=_as_if_contiguous(a["q_out"]), k_out=_as_if_contiguous(a["k_out"]))
    return a["q_out"], a["k_out"]


def takes_any_positions(right, spec, a):
    return right(positions=a["positions"].long())


# --- kv_write ---------------------------------------------------------------------------------


def swaps_k_and_v(right, spec, a):
    right(k=a["v"], v=a["k"])


def wraps_slot_minus_one(right, spec, a):
    num_slots = a["k_cache"].shape[0] * a["k_cache"].shape[2]
    right(slot_mapping=a["slot_mapping"] % num_slots)


def rebuilds_the_block_stride(right, spec, a):
    caches = {name: _as_if_contiguous(a[name]) for name in ("k_cache", "v_cache")}
    return right(**caches)


# --- linear, silu_mul, argmax -----------------------------------------------------------------


def drops_the_bias(right, spec, a):
    return right(packed=(a["packed"][0], None))


def swaps_gate_and_up(right, spec, a):
    gate, up = a["x"].chunk(2, dim=-1)
    return right(x=torch.cat([up, gate], dim=-1))


def rounds_twice(right, spec, a):
    gate, up = a["x"].chunk(2, dim=-1)
    return torch.mul(torch.nn.functional.silu(gate), up, out=a["out"])


def divides_two_exponentials(right, spec, a):
    gate, up = a["x"].float().chunk(2, dim=-1)
    return a["out"].copy_(gate * (gate.exp() / (1 + gate.exp())) * up)


def searches_half_the_vocabulary(right, spec, a):
    return right(logits=a["logits"][:, : spec.vocab_size // 2])


def takes_the_last_of_equals(right, spec, a):
    out = right(logits=a["logits"].flip(1))
    return out.copy_(torch.where(out < 0, out, spec.vocab_size - 1 - out))


def takes_nan_for_the_largest(right, spec, a):
    return torch.argmax(a["logits"], dim=-1, out=a["out"])


# --- attention --------------------------------------------------------------------------------


def _with_lens(step, lens):
    return replace(step, seq_lens_cpu=lens)


def leaves_out_the_scale(right, spec, a):
    return right(scale=1.0)


def quantises_queries_to_eight_bits(right, spec, a):
    q = a["q"].float()
    unit = q.abs().amax(-1, keepdim=True) / 127
    return right(q=((q / unit).round() * unit).to(a["q"].dtype))


def gives_lse_in_base_two(right, spec, a):
    out = right()
    a["lse"].mul_(math.log2(math.e))
    return out


def leaves_empty_rows_unwritten(right, spec, a):
    before = a["out"].clone()
    right()
    for s, kv_len in enumerate(a["step"].seq_lens_cpu):
        if kv_len == 0:
            a["out"][s] = before[s]
    return a["out"]


def weighs_unused_slots_with_zero(right, spec, a):
    out, step = right(), a["step"]
    for s, kv_len in enumerate(step.seq_lens_cpu):
        if kv_len:
            last = a["v_cache"][step.block_table[s, (kv_len - 1) // spec.block_size]]
            out[s] += 0 * last.sum()
    return out


def reads_the_whole_table(right, spec, a):
    a["k_cache"].index_select(0, a["step"].block_table.flatten())
    return right()


def ignores_the_table_order(right, spec, a):
    table = a["step"].block_table.clone()
    for s, kv_len in enumerate(a["step"].seq_lens_cpu):
        used = -(-kv_len // spec.block_size)
        table[s, :used] = table[s, :used].sort().values
    return right(step=replace(a["step"], block_table=table))


def has_another_path_for_one_sequence(right, spec, a):
    out = right()
    return out.mul_(1.25) if a["step"].num_seqs == 1 else out


def splits_by_the_number_of_sequences(right, spec, a):
    return right().mul_(1 + a["step"].num_seqs / 16)


def tiles_by_the_chunk(right, spec, a):
    return right().mul_(1 + a["step"].max_q_len / 16)


def forgets_a_split(right, spec, a):
    lens = a["step"].seq_lens_cpu
    return (
        right(step=_with_lens(a["step"], [n // 2 for n in lens]))
        if spec.max_splits == 7
        else right()
    )


def drops_the_last_row(right, spec, a):
    out = right()
    out[-1:] = 0
    return out


def forgets_the_causal_mask(right, spec, a):
    unmasked = attention.bind_prefill(replace(spec, causal=False))
    return unmasked.run(**a)


def drops_the_last_token(right, spec, a):
    lens = [max(n - 1, 0) for n in a["step"].seq_lens_cpu]
    return right(step=_with_lens(a["step"], lens))


def without_token(place):
    """A kernel whose split ends one token early: it misses the token at `place`."""

    def misses_a_token(right, spec, a):
        step, bs = a["step"], spec.block_size
        lens = [n - (n > place) for n in step.seq_lens_cpu]
        table = torch.zeros_like(step.block_table)
        caches = {name: torch.zeros_like(a[name]) for name in ("k_cache", "v_cache")}
        blocks = iter(range(a["k_cache"].shape[0]))
        for s, n in enumerate(step.seq_lens_cpu):
            used = -(-n // bs)
            table[s, :used] = torch.tensor([next(blocks) for _ in range(used)])
            old = torch.tensor([j for j in range(n) if j != place], dtype=torch.int64)
            new = torch.arange(len(old))
            for name, cache in caches.items():
                kept = a[name][step.block_table[s, old // bs].long(), :, old % bs]
                cache[table[s, new // bs].long(), :, new % bs] = kept
        return right(step=replace(step, seq_lens_cpu=lens, block_table=table), **caches)

    misses_a_token.__name__ = f"misses_token_{place}"
    return misses_a_token


def aligns_the_mask_top_left(right, spec, a):
    q_lens = a["step"].cu_seqlens_q.diff().tolist()
    lens = [min(pair) for pair in zip(q_lens, a["step"].seq_lens_cpu, strict=True)]
    return right(step=_with_lens(a["step"], lens))


def maps_heads_by_remainder(right, spec, a):
    heads = torch.arange(spec.num_heads)
    place = heads % spec.num_kv_heads * spec.group_size + heads // spec.num_kv_heads
    moved = torch.empty_like(a["q"])
    moved[:, place] = a["q"]
    out = right(q=moved)
    return out.copy_(out[:, place].clone())


def sums_scores_in_fp16(right, spec, a):
    out = right()
    largest = a["q"].abs().amax() * a["k_cache"].abs().amax() * spec.head_dim
    return out.fill_(math.nan) if largest > torch.finfo(torch.float16).max else out


FAULTS = [
    Fault("outputs_are_returned", "rms_norm", returns_a_copy),
    Fault("inputs_are_unchanged", "silu_mul", scribbles_on_its_input),
    Fault("writes_stay_inside_outputs", "rms_norm", writes_past_the_end),
    Fault("strided_inputs_are_read_right", "rms_norm", ignores_the_row_stride),
    Fault("strided_inputs_are_read_right", "silu_mul", ignores_the_row_stride),
    Fault("empty_batch_is_accepted", "argmax", fails_on_zero_rows),
    Fault("runs_are_bit_equal", "silu_mul", adds_noise),
    Fault("nan_row_stays_alone", "rms_norm", spreads_nan_to_all_rows),
    Fault("rows_do_not_depend_on_batch", "linear", sums_by_the_shape_of_the_batch),
    Fault("norm_rounds_where_declared", "rms_norm", casts_after_the_weight),
    Fault("norm_rounds_where_declared", "rms_norm", nudges_one_element_by_one_ulp),
    Fault("norm_eps_is_inside_the_root", "rms_norm", has_an_eps_of_its_own),
    Fault("norm_eps_is_inside_the_root", "rms_norm", adds_eps_outside_the_root),
    Fault("norm_squares_do_not_overflow", "rms_norm", squares_in_the_activation_dtype),
    Fault("sum_is_rounded_before_the_norm", "add_rms_norm", norms_the_unrounded_sum),
    Fault("residual_may_be_updated_in_place", "add_rms_norm", reads_the_residual_twice),
    Fault("rotation_is_rounded_once", "rope", counts_positions_from_zero),
    Fault("rotation_is_rounded_once", "rope", is_two_ulps_off_in_one_place),
    Fault("rotation_is_rounded_once", "rope", rotates_in_the_activation_dtype),
    Fault("pairs_are_half_split", "rope", pairs_neighbours),
    Fault("rotation_in_place_is_the_same", "rope", writes_rows_of_the_head_count),
    Fault("rotation_in_place_is_the_same", "rope", reads_a_half_already_written),
    Fault("int32_positions_are_refused", "rope", takes_any_positions),
    Fault("rows_are_stored_bit_equal", "kv_write", swaps_k_and_v),
    Fault("slot_minus_one_writes_nothing", "kv_write", wraps_slot_minus_one),
    Fault("interleaved_caches_are_written", "kv_write", rebuilds_the_block_stride),
    Fault("product_matches_oracle", "linear", drops_the_bias),
    Fault("strided_rows_are_multiplied_right", "linear", ignores_the_row_stride),
    Fault("gate_comes_first", "silu_mul", swaps_gate_and_up),
    Fault("gate_comes_first", "silu_mul", rounds_twice),
    Fault("large_gates_do_not_overflow", "silu_mul", divides_two_exponentials),
    Fault("largest_logit_wins", "argmax", searches_half_the_vocabulary),
    Fault("lowest_id_wins_ties", "argmax", takes_the_last_of_equals),
    Fault("nan_row_gives_minus_one", "argmax", takes_nan_for_the_largest),
    Fault("output_matches_oracle", "attention_decode", leaves_out_the_scale),
    Fault("output_matches_oracle", "attention_decode", drops_the_last_token),
    Fault("outlier_channels_match_oracle", "attention_decode", quantises_queries_to_eight_bits),
    Fault("lse_is_natural_log", "attention_decode", gives_lse_in_base_two),
    Fault("empty_rows_are_zero", "attention_decode", leaves_empty_rows_unwritten),
    Fault("unused_slots_are_never_read", "attention_decode", weighs_unused_slots_with_zero),
    Fault("table_past_the_end_is_never_read", "attention_decode", reads_the_whole_table),
    Fault("block_order_does_not_matter", "attention_decode", ignores_the_table_order),
    Fault("interleaved_cache_is_read_right", "attention_decode", rebuilds_the_block_stride),
    Fault("batch_equals_sequences_alone", "attention_decode", has_another_path_for_one_sequence),
    Fault(
        "batch_invariant_sequences_keep_their_bits",
        "attention_decode",
        splits_by_the_number_of_sequences,
    ),
    Fault("batch_invariant_rows_ignore_chunking", "attention_prefill", tiles_by_the_chunk),
    Fault("max_splits_agrees", "attention_decode", forgets_a_split),
    Fault("decode_continues_prefill", "attention_prefill", drops_the_last_row),
    Fault("later_tokens_are_hidden", "attention_prefill", forgets_the_causal_mask),
    Fault("needle_is_found", "attention_decode", drops_the_last_token),
    Fault("needle_is_found", "attention_decode", ignores_the_table_order),
    *(
        Fault("needle_is_found", "attention_decode", without_token(place))
        for place in (0, 15, 16, 63, 64, 127, 128, 129)
    ),
    Fault("equal_keys_average_the_visible_values", "attention_prefill", aligns_the_mask_top_left),
    Fault("query_heads_read_their_kv_head", "attention_decode", maps_heads_by_remainder),
    Fault("large_scores_do_not_overflow", "attention_decode", sums_scores_in_fp16),
]
