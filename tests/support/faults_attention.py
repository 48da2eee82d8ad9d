"""Faults of attention."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from support.fault import Fault
from tvr.backends.torch_ref import attention


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


def maps_heads_by_repeat(right, spec, a):
    """KV heads repeated as a whole, so that query head h reads KV head h % num_kv_heads."""
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


def scales_by_its_own_root_of_head_dim(right, spec, a):
    return right(scale=spec.head_dim**-0.5)


def ignores_the_cap(right, spec, a):
    return attention.bind_decode(replace(spec, softcap=None)).run(**a)


def accumulates_values_in_the_activation_dtype(right, spec, a):
    """Tile by tile, with the sum so far rounded every time."""
    right()
    step, size, group = a["step"], spec.block_size, spec.group_size
    for s, kv_len in enumerate(step.seq_lens_cpu):
        token = torch.arange(kv_len)
        at = step.block_table[s, token // size].long(), slice(None), token % size
        k, v = (a[n][at].float().repeat_interleave(group, 1) for n in ("k_cache", "v_cache"))
        score = torch.einsum("khd,hd->kh", k, a["q"][s].float()) * a["scale"]
        total = torch.zeros_like(a["out"][s])
        for start in range(0, kv_len, 8):
            tile = slice(start, start + 8)
            weights = score.softmax(0)[tile].unsqueeze(-1)
            total = (total.float() + (weights * v[tile]).sum(0)).to(total.dtype)
        if spec.softcap is None and spec.window is None:
            a["out"][s] = total
    return a["out"]


def sees_one_key_more_in_a_window(right, spec, a):
    window = None if spec.window is None else spec.window + 1
    return attention.bind_decode(replace(spec, window=window)).run(**a)


def shares_a_tile_with_the_next_sequence(right, spec, a):
    out = right()
    return out.add_(0 * a["q"].roll(1, 0).sum(dim=(1, 2), keepdim=True))


def reads_past_its_sequence_into_the_next(right, spec, a):
    out = right()
    out[:-1] += 0 * a["q"][1:].sum(dim=(1, 2), keepdim=True)
    return out


def divides_nothing_by_nothing_in_an_empty_split(right, spec, a):
    """Keys are cut into four splits by the longest sequence; a short one has none in the last."""
    out, step = right(), a["step"]
    for s, kv_len in enumerate(step.seq_lens_cpu):
        if 0 < kv_len <= 3 * step.max_seq_len // 4 and step.max_seq_len > spec.block_size:
            out[s] = math.nan
    return out


def counts_a_key_that_is_not_there(right, spec, a):
    out = right()
    for s, kv_len in enumerate(a["step"].seq_lens_cpu):
        out[s] *= kv_len / (kv_len + 1)
    return out


def ends_at_65536_tokens(right, spec, a):
    return right(step=_with_lens(a["step"], [min(n, 2**16) for n in a["step"].seq_lens_cpu]))


def reads_the_first_kv_head_only(right, spec, a):
    caches = {n: a[n][:, :1].expand(a[n].shape) for n in ("k_cache", "v_cache")}
    return right(**caches)


FAULTS = [
    Fault("output_matches_oracle", "attention_decode", leaves_out_the_scale),
    Fault("output_matches_oracle", "attention_decode", drops_the_last_token),
    Fault("outlier_channels_match_oracle", "attention_decode", quantises_queries_to_eight_bits),
    Fault("lse_is_natural_log", "attention_decode", gives_lse_in_base_two),
    Fault("empty_rows_are_zero", "attention_decode", leaves_empty_rows_unwritten),
    Fault("unused_slots_are_never_read", "attention_decode", weighs_unused_slots_with_zero),
    Fault("table_past_the_end_is_never_read", "attention_decode", reads_the_whole_table),
    Fault("block_order_does_not_matter", "attention_decode", ignores_the_table_order),
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
    Fault("query_heads_read_their_kv_head", "attention_decode", maps_heads_by_repeat),
    Fault("large_scores_do_not_overflow", "attention_decode", sums_scores_in_fp16),
    Fault("output_matches_oracle", "attention_decode", ignores_the_cap),
    Fault("output_matches_oracle", "attention_decode", accumulates_values_in_the_activation_dtype),
    Fault("needle_is_found", "attention_decode", scales_by_its_own_root_of_head_dim),
    Fault(
        "equal_keys_average_the_visible_values", "attention_decode", sees_one_key_more_in_a_window
    ),
    Fault("nan_sequence_stays_alone", "attention_decode", shares_a_tile_with_the_next_sequence),
    Fault("nan_sequence_stays_alone", "attention_decode", reads_past_its_sequence_into_the_next),
    Fault(
        "empty_splits_weigh_nothing",
        "attention_decode",
        divides_nothing_by_nothing_in_an_empty_split,
    ),
    Fault("one_key_gives_its_value", "attention_decode", counts_a_key_that_is_not_there),
    Fault(
        "late_values_of_a_long_context_count",
        "attention_decode",
        ends_at_65536_tokens,
        level="full",
    ),
    Fault("query_heads_read_their_kv_head", "attention_decode", reads_the_first_kv_head_only),
]
