"""Faults that show in a running model: each op looks right by itself, or all but right.

They are planted as those of `support.faults` are; a model is what catches them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import torch

from support.fault import Fault
from support.faults_attention import ignores_the_table_order
from support.faults_dense import searches_half_the_vocabulary
from support.faults_norm import casts_after_the_weight
from tvr.conformance import oracle


def _with_lens(step, lens):
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return replace(step, seq_lens=seq_lens, seq_lens_cpu=lens, max_seq_len=max(lens))


def _q_lens(step):
    return step.cu_seqlens_q.diff().tolist()


# --- RoPE -------------------------------------------------------------------------------------


def restarts_positions_in_each_chunk(right, spec, a):
    positions = a["positions"]
    return right(positions=positions - positions[0] if len(positions) > 1 else positions)


def turns_a_single_row_the_other_way(right, spec, a):
    """The kernel for one row, which only decode has, has the sign of the sine wrong."""
    table = a["cos_sin_cache"].clone()
    if len(a["positions"]) == 1:
        table[:, table.shape[1] // 2 :] *= -1
    return right(cos_sin_cache=table)


# --- attention --------------------------------------------------------------------------------


def decodes_without_the_new_token(right, spec, a):
    lens = [max(n - 1, 0) for n in a["step"].seq_lens_cpu]
    return right(step=_with_lens(a["step"], lens))


def sees_the_new_chunk_only(right, spec, a):
    """As if K and V of this step were all there is."""
    lens, q_lens = a["step"].seq_lens_cpu, _q_lens(a["step"])
    if lens == q_lens:
        return right()
    for start, end in itertools.pairwise(a["step"].cu_seqlens_q.tolist()):
        rows, q_len = slice(start, end), end - start
        used = -(-q_len // spec.block_size)
        caches = {}
        for name in "kv":
            padded = a[name].new_zeros(used * spec.block_size, *a[name].shape[1:])
            padded[:q_len] = a[name][rows]
            blocks = padded.view(used, spec.block_size, *a[name].shape[1:])
            caches[f"{name}_cache"] = blocks.transpose(1, 2).contiguous()
        step = replace(
            _with_lens(a["step"], [q_len]),
            block_table=torch.arange(used, dtype=torch.int32).view(1, -1),
            cu_seqlens_q=torch.tensor([0, q_len], dtype=torch.int32),
            num_seqs=1,
            num_tokens=q_len,
        )
        new = {name: a[name][rows] for name in "qkv"}
        right(**new, **caches, step=step, out=a["out"][rows])
    return a["out"]


def drops_prefixes_beside_a_row_that_has_none(right, spec, a):
    lens, q_lens = a["step"].seq_lens_cpu, _q_lens(a["step"])
    is_mixed = any(n == q for n, q in zip(lens, q_lens, strict=True)) and lens != q_lens
    return sees_the_new_chunk_only(right, spec, a) if is_mixed else right()


def reads_blocks_kept_from_before(right, spec, a):
    """A cache of gathered blocks, by their ids, that nobody tells when a block is written anew."""
    step = a["step"]
    key = (a["k_cache"].data_ptr(), str(step.block_table.tolist()), str(step.seq_lens_cpu))
    copies = {name: a[name].clone() for name in ("k_cache", "v_cache")}
    # The tensor too, so that no other one comes to its address.
    _, copies = right.state.setdefault(key, (a["k_cache"], copies))
    return right(**copies)


def gives_all_rows_the_first_table(right, spec, a):
    table = a["step"].block_table.clone()
    table[1:] = table[0]
    lens = [min(n, a["step"].seq_lens_cpu[0]) for n in a["step"].seq_lens_cpu]
    return right(step=replace(_with_lens(a["step"], lens), block_table=table))


def reads_lengths_of_the_capture(right, spec, a):
    """Lengths are copied when a graph is captured, not when it is replayed."""
    step = a["step"]
    if step.num_seqs > 1 and set(step.seq_lens_cpu) == {step.max_seq_len}:  # the bounds: a graph
        lens = right.state.setdefault("lens", step.seq_lens.clone())
        step = replace(step, seq_lens=lens)
    return right(step=step)


def cuts_keys_by_the_number_of_chunks(right, spec, a):
    """Padding chunks are counted, and tiles of keys are shorter where there are many chunks."""
    out = right()
    if a["step"].num_seqs > 8:
        out.mul_(1 + 2 * torch.finfo(out.dtype).eps)
    return out


# --- linear -----------------------------------------------------------------------------------


def _summed(a, order, dtype):
    """x @ weight.T in pieces of 8 terms, added up in this order and in this dtype."""
    x, weight = a["x"].float(), a["packed"][0][: a["out"].shape[1], : a["x"].shape[1]].float()
    total = torch.zeros(a["out"].shape, dtype=dtype)
    for start in order(range(0, x.shape[1], 8)):
        piece = slice(start, start + 8)
        total += (x[:, piece] @ weight[:, piece].t()).to(dtype)
    return a["out"].copy_(total)


def accumulates_in_the_activation_dtype(right, spec, a):
    return _summed(a, iter, a["x"].dtype)


def sums_in_another_order_in_a_batch(right, spec, a):
    return _summed(a, reversed if len(a["x"]) > 1 else iter, a["x"].dtype)


def sums_in_another_order_for_eight_rows(right, spec, a):
    """The kernel for eight rows, to which a graph fills up what has fewer."""
    return _summed(a, reversed if len(a["x"]) == 8 else iter, a["x"].dtype)


# --- no faults --------------------------------------------------------------------------------


def sums_in_pieces(right, spec, a):
    return _summed(a, iter, torch.float32)


def sums_in_any_order(right, spec, a):
    """As atomic additions do: two runs differ."""
    drawn = right.state.setdefault("random", random.Random(0))
    return _summed(a, lambda pieces: drawn.sample(pieces, len(pieces)), torch.float32)


def rounds_the_softmax_weights(right, spec, a):
    """As matrix units want them."""
    step = a["step"]
    for s, (start, end) in enumerate(itertools.pairwise(step.cu_seqlens_q.tolist())):
        token = torch.arange(step.seq_lens_cpu[s])
        block, offset = step.block_table[s, token // spec.block_size], token % spec.block_size
        k, v = (a[name][block.long(), :, offset] for name in ("k_cache", "v_cache"))
        q = a["q"][start:end]
        a["out"][start:end] = oracle.low_precision_attention(spec, a["scale"], q, k, v)
    return a["out"]


#: As right as the reference, in another way.
ANOTHER_WAY = [
    Fault("", "linear", sums_in_pieces),
    Fault("", "attention_prefill", rounds_the_softmax_weights),
    Fault("", "rms_norm", casts_after_the_weight),
]

ENGINE_FAULTS = [
    Fault(check, op, fault, subject="engine")
    for check, op, fault in (
        ("decode_equals_longer_prefill", "attention_decode", decodes_without_the_new_token),
        ("decode_equals_longer_prefill", "rope_kv_write", turns_a_single_row_the_other_way),
        ("chunked_prompt_equals_one_shot", "attention_prefill", sees_the_new_chunk_only),
        ("cached_keys_ignore_chunking", "rope_kv_write", restarts_positions_in_each_chunk),
        ("physical_blocks_do_not_matter", "attention_prefill", ignores_the_table_order),
        ("reused_blocks_hold_nothing_old", "attention_decode", reads_blocks_kept_from_before),
        ("mixed_step_equals_each_alone", "attention_decode", gives_all_rows_the_first_table),
        (
            "shared_prefix_is_attended_to",
            "attention_prefill",
            drops_prefixes_beside_a_row_that_has_none,
        ),
        ("graph_replay_equals_eager", "attention_decode", reads_lengths_of_the_capture),
        ("greedy_tokens_match_reference", "argmax", searches_half_the_vocabulary),
        ("half_precision_errs_like_reference", "linear", accumulates_in_the_activation_dtype),
        ("batch_invariant_model_keeps_its_bits", "linear", sums_in_another_order_in_a_batch),
        ("batch_invariant_graphs_keep_their_bits", "linear", sums_in_another_order_for_eight_rows),
        (
            "batch_invariant_chunks_in_graphs_keep_their_bits",
            "attention_prefill",
            cuts_keys_by_the_number_of_chunks,
        ),
    )
]
