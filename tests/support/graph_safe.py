"""A backend in torch that can be captured: it reads lengths, tables and slots on the device only.

Attention is split as a flash-decoding kernel splits it: `plan` writes the number of splits of
each sequence to the workspace, `run` writes the partial results of those splits there, leaving
what others hold, and combines them. All other ops are the reference backend's.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from tvr.backends.torch_ref import plugin, rope
from tvr.backends.torch_ref.random import gumbel_noise
from tvr.backends.torch_ref.sample import _filter, _penalise
from tvr.contract import BoundOp, why_not
from tvr.hookspecs import hookimpl

SPLIT = 32  # keys of a split


def _info():
    right = plugin.tvr_backend_info()
    flags = frozenset({"cuda_graph", "plan_in_graph", "deterministic"})

    def box(reference):
        return replace(reference, fields=reference.fields - {"max_splits"}, flags=flags)

    return replace(
        right, name="graph_safe", ops={op: [box(b) for b in bs] for op, bs in right.ops.items()}
    )


INFO = _info()


class SplitAttention:
    """Attention of rows [R, H, D], of which row r belongs to sequence `seq[r]`."""

    def __init__(self, spec):
        self.spec = spec
        self.workspace = None

    def bound(self):
        is_decode = self.spec.op == "attention_decode"
        return BoundOp(
            run=self.decode if is_decode else self.prefill,
            plan=self.plan,
            workspace_bytes=self.workspace_bytes,
            attach=self.attach,
        )

    def _sizes(self, bounds):
        """Elements of: counts [S] int32; sums [R, H, splits, D] and (m, l) [2, R, H, splits]."""
        splits = -(-bounds.max_seq_len // SPLIT)
        per_row = self.spec.num_heads * splits
        rows = bounds.max_num_tokens
        if self.spec.op == "attention_decode":
            rows = bounds.max_num_seqs * self.spec.max_q_len
        return bounds.max_num_seqs, rows * per_row * self.spec.head_dim, 2 * rows * per_row

    def workspace_bytes(self, bounds):
        return 4 * sum(self._sizes(bounds))

    def attach(self, workspace):
        self.workspace = workspace

    def plan(self, step):
        self._counts(step).copy_((step.seq_lens + SPLIT - 1) // SPLIT)

    def _counts(self, step):
        return self.workspace[: 4 * step.num_seqs].view(torch.int32)

    def decode(self, q, k_cache, v_cache, step, *, scale, out, lse=None):
        rows = torch.arange(len(q), device=q.device)
        q_len = self.spec.max_q_len
        position = step.seq_lens[rows // q_len] - q_len + rows % q_len
        self._attend(q, k_cache, v_cache, step, rows // q_len, position, scale, out, lse)
        return out

    def prefill(self, q, k, v, k_cache, v_cache, step, *, scale, out, lse=None):
        rows = torch.arange(len(q), device=q.device)
        seq = torch.searchsorted(step.cu_seqlens_q[1:], rows.int(), right=True)
        seq = seq.clamp_max(step.num_seqs - 1)  # rows behind the last sequence
        position = step.seq_lens[seq] - step.cu_seqlens_q[seq + 1] + rows
        self._attend(q, k_cache, v_cache, step, seq, position, scale, out, lse)
        return out

    def _attend(self, q, k_cache, v_cache, step, seq, position, scale, out, lse):
        if not len(q):
            return
        live = SPLIT * self.num_splits(step)[seq]  # [R] keys in splits that are computed
        keys = torch.arange(self.max_keys(step), device=q.device)
        hidden = self._hidden(step.seq_lens[seq], position, keys)  # [R, m]
        block = (keys // self.spec.block_size).clamp_max(step.block_table.shape[1] - 1)
        ids = step.block_table[seq][:, block]
        read = keys < step.seq_lens[seq].unsqueeze(1)
        ids = ids.masked_fill(~read, 0)
        scores = self._scores(q, self._rows(k_cache, ids, keys, read), scale)
        scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))  # [R, H, m]
        parts = scores.unflatten(2, (-1, SPLIT))
        m = parts.amax(-1)
        weights = (parts - m.masked_fill(m.isneginf(), 0).unsqueeze(-1)).exp()
        values = self._rows(v_cache, ids, keys, read).unflatten(2, (-1, SPLIT))
        sums = torch.einsum("rhsk,rhskd->rhsd", weights, values)
        self._write_partials(step, sums, m, weights.sum(-1), live)
        self._combine(step, live, out, lse)

    def _write_partials(self, step, sums, m, total, live):
        computed = self._computed(live, m.shape)
        for kept, new in zip(self._partials(m.shape), (sums, m, total), strict=True):
            mask = computed.unsqueeze(-1) if new.dim() == 4 else computed
            kept.copy_(torch.where(mask, new, kept))

    def _combine(self, step, live, out, lse):
        splits = self.max_keys(step) // SPLIT
        shape = (len(out), self.spec.num_heads, splits)
        sums, m, total = self._partials(shape)
        combined = self.combined(live, shape)
        m = m.masked_fill(~combined, float("-inf"))
        largest = m.amax(-1, keepdim=True)
        factor = (m - largest).exp().masked_fill(m.isneginf(), 0)
        total = (total.masked_fill(~combined, 0) * factor).sum(-1)
        sums = sums.masked_fill(~combined.unsqueeze(-1), 0)
        result = (sums * factor.unsqueeze(-1)).sum(2)
        out.copy_(result / total.masked_fill(total == 0, 1).unsqueeze(-1))
        if lse is not None:
            lse.copy_(largest.squeeze(-1) + total.log())

    # What a faulty backend does otherwise:

    def num_splits(self, step):
        """[S] splits of each sequence, as planned."""
        return self._counts(step)

    def max_keys(self, step):
        """Keys to look at, a multiple of SPLIT: the host integer is a bound."""
        return max(1, -(-step.max_seq_len // SPLIT)) * SPLIT

    def combined(self, live, shape):
        return self._computed(live, shape)

    def _computed(self, live, shape):
        split = torch.arange(shape[-1], device=live.device)
        return (split * SPLIT < live.view(-1, 1, 1)).expand(shape)

    def _partials(self, shape):
        """Views [R, H, splits(, D)] of the workspace, from its end: the counts are in front."""
        rows, heads, splits = shape
        small, dim = rows * heads * splits, self.spec.head_dim
        floats = self.workspace.view(torch.float32)
        sums, m, total = floats[len(floats) - small * (dim + 2) :].split(
            [small * dim, small, small]
        )
        return sums.view(*shape, dim), m.view(shape), total.view(shape)

    def _hidden(self, kv_len, position, keys):
        position = position.unsqueeze(1)
        hidden = keys >= kv_len.unsqueeze(1)
        if self.spec.causal:
            hidden = hidden | (keys > position)
        if self.spec.window is not None:
            hidden = hidden | (keys <= position - self.spec.window)
        return hidden

    def _rows(self, cache, ids, keys, read):
        """[R, H, m, D] fp32; zeros where there is no token."""
        found = cache[ids.long(), :, keys % self.spec.block_size].float()  # [R, m, KVH, D]
        found = found.masked_fill(~read[..., None, None], 0).transpose(1, 2)
        return found.unsqueeze(2).expand(-1, -1, self.spec.group_size, -1, -1).flatten(1, 2)

    def _scores(self, q, k, scale):
        scores = torch.einsum("rhd,rhmd->rhm", q.float(), k) * scale
        cap = self.spec.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


def write_kv(k, v, k_cache, v_cache, slot_mapping):
    """Each slot looks up its row, so that rows of slot -1 need no host to leave them out."""
    if not len(k):
        return
    blocks, _, block_size, _ = k_cache.shape
    num_slots = blocks * block_size
    row_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=k.device)
    slots = slot_mapping.masked_fill(slot_mapping < 0, num_slots)
    row_of_slot.scatter_(0, slots, torch.arange(len(k), device=k.device))
    row = row_of_slot[:-1]
    is_new = (row >= 0).view(blocks, 1, block_size, 1)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        new = rows.to(cache.dtype)[row.clamp_min(0)].unflatten(0, (blocks, block_size))
        cache.copy_(torch.where(is_new, new.transpose(1, 2), cache))


def sample(logits, rows, output_positions, tables, last_token, *, out):
    """What every row could need, computed for every row."""
    x = _penalise(logits.float(), rows, tables)
    best, largest = x.max(dim=-1)
    heat = tables.temperature[rows]
    gaps = (best[:, None] - x) / torch.where(heat > 0, heat, 1)[:, None]
    gaps = gaps.masked_fill(gaps > tables.max_gap[rows, None], torch.inf)
    gaps = _filter(gaps, tables.top_k[rows], tables.top_p[rows])
    noise = gumbel_noise(tables.seeds[rows], output_positions, x.shape[1])
    tokens = torch.where(heat > 0, (noise - gaps).argmax(dim=-1), largest)
    out.copy_(torch.where(best.isfinite(), tokens, -1))
    last_token[rows] = tokens = out.clamp(min=0)
    penalties = tables.repetition - 1, tables.presence, tables.frequency
    counted = torch.stack(penalties).ne(0).any(0)[rows] & (out >= 0)
    counts = tables.counts[rows, tokens]
    tables.counts[rows, tokens] = torch.where(counted & (counts < 32766), counts + 2, counts)
    return out


def bind_sample(spec, device):
    return BoundOp(run=sample)


def bind_attention(spec, device):
    return SplitAttention(spec).bound()


def bind_kv_write(spec, device):
    return BoundOp(run=write_kv)


def bind_rope_kv_write(spec, device):
    turn = rope.bind_rope(spec).run

    def run(q, k, v, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, *, q_out, k_out):
        turn(q, k, positions, cos_sin_cache, q_out=q_out, k_out=k_out)
        write_kv(k_out, v, k_cache, v_cache, slot_mapping)
        return q_out, k_out

    return BoundOp(run=run)


_OWN = {
    "attention_decode": bind_attention,
    "attention_prefill": bind_attention,
    "kv_write": bind_kv_write,
    "rope_kv_write": bind_rope_kv_write,
    "sample": bind_sample,
}


def backend(change=lambda bound, spec: bound):
    """Return the backend; `change` is given every `BoundOp` and its spec, and returns another."""
    hooks = {"tvr_backend_info": hookimpl(lambda: INFO)}
    for op in INFO.ops:
        hooks[f"tvr_bind_{op}"] = _hook(_OWN.get(op) or _reference(op), change)
    return SimpleNamespace(**hooks)


def plans_on_the_host():
    """Return the backend, whose plan is not to be captured, and asserts that it is not."""
    right = backend()
    ops = {
        op: [replace(box, flags=box.flags - {"plan_in_graph"}) for box in boxes]
        for op, boxes in INFO.ops.items()
    }
    info = replace(INFO, ops=ops)

    def bind_attention_decode(spec, device):
        bound = bind_attention(spec, device)

        def plan(step):
            # Real lengths of the host, which no capture may read.
            lens = torch.tensor(step.seq_lens_cpu, dtype=torch.int32)
            assert step.max_seq_len == max(step.seq_lens_cpu)
            bound.plan(replace(step, seq_lens=lens))

        return replace(bound, plan=plan)

    hooks = vars(right) | {
        "tvr_backend_info": hookimpl(lambda: info),
        "tvr_bind_attention_decode": hookimpl(bind_attention_decode),
    }
    return SimpleNamespace(**hooks)


def _reference(op):
    hook = getattr(plugin, f"tvr_bind_{op}")
    return lambda spec, device: hook(spec=spec, device=device)


def _hook(bind, change):
    @hookimpl
    def hook(spec, device):
        return None if why_not(INFO, spec, device) else change(bind(spec, device), spec)

    return hook
