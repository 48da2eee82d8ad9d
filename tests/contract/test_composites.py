"""Composed ops against their definition, with real tensors."""

from __future__ import annotations

import pytest
import torch

from support.fakes import fake, table_of
from support.specs import spec_of
from tvr.contract import BoundOp


def norm(x, weight, *, eps, out):
    wide = x.double()
    return out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight)


def double_and_swap(q, k, positions, cos_sin_cache, *, q_out, k_out):
    """Stands for a rotation: another function of q, k and the positions."""
    q_out.copy_(q * positions[:, None, None] * 2)
    k_out.copy_(k * positions[:, None, None] * 3)
    return q_out, k_out


def write(k, v, k_cache, v_cache, slot_mapping):
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // 16, :, slot % 16] = k[token]
            v_cache[slot // 16, :, slot % 16] = v[token]


@pytest.fixture
def table():
    runs = {"rms_norm": norm, "rope": double_and_swap, "kv_write": write}
    bind = {op: lambda spec, device: BoundOp(run=runs[spec.op]) for op in runs}
    return table_of(fake("parts", list(runs), bind=bind))


def test_the_sum_is_rounded_to_the_activation_dtype_before_the_norm_reads_it(table):
    """256 + 1.5 is 258 in bf16 and 257.5 unrounded; the norm of the row shows which was read."""
    x = torch.tensor([[1.5, 0.0]], dtype=torch.bfloat16)
    residual = torch.tensor([[256.0, 100.0]], dtype=torch.bfloat16)
    weight = torch.ones(2, dtype=torch.float64)
    seen = []

    def spy(x, weight, *, eps, out):
        seen.append(x.clone())
        return norm(x, weight, eps=eps, out=out)

    spied = table_of(
        fake("parts", ["rms_norm"], bind={"rms_norm": lambda spec, device: BoundOp(run=spy)})
    )
    out = torch.empty(1, 2, dtype=torch.bfloat16)
    residual_out = torch.empty_like(out)
    bound = spied.bind(spec_of("add_rms_norm", dtype="bfloat16", hidden_size=2))
    result = bound.run(x, residual, weight, eps=0.0, out=out, residual_out=residual_out)
    assert seen[0].tolist() == [[258.0, 100.0]]
    assert seen[0].dtype == torch.bfloat16
    assert residual_out.tolist() == [[258.0, 100.0]]
    assert result[0] is out
    assert result[1] is residual_out


@pytest.mark.parametrize("alias", [False, True])
def test_residual_out_may_be_the_residual_and_nothing_else_is_written(table, alias):
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 3, 64, generator=generator).unbind()
    weight = torch.randn(64, generator=generator)
    given, total = x.clone(), x + residual
    before = residual.clone()
    out = torch.empty(3, 64)
    residual_out = residual if alias else torch.empty(3, 64)
    bound = table.bind(spec_of("add_rms_norm"))
    bound.run(x, residual, weight, eps=1e-5, out=out, residual_out=residual_out)
    assert torch.equal(residual_out, total)
    assert torch.equal(out, norm(total, weight, eps=1e-5, out=torch.empty(3, 64)))
    assert torch.equal(x, given)
    assert alias or torch.equal(residual, before)


@pytest.mark.parametrize("alias", [False, True])
def test_the_rotated_keys_are_what_is_written_to_the_cache(table, alias):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(5, 6, 16, generator=generator)
    k, v = torch.randn(2, 5, 2, 16, generator=generator).unbind()
    positions = torch.arange(1, 6)
    k_cache, v_cache = torch.zeros(2, 3, 2, 16, 16).unbind()
    slots = torch.tensor([0, 17, -1, 33, 47])
    wanted_q, wanted_k = q * positions[:, None, None] * 2, k * positions[:, None, None] * 3
    q_out, k_out = (q, k) if alias else (torch.empty_like(q), torch.empty_like(k))
    result = table.bind(spec_of("rope_kv_write")).run(
        q, k, v, positions, None, k_cache, v_cache, slots, q_out=q_out, k_out=k_out
    )
    assert result[0] is q_out
    assert result[1] is k_out
    assert torch.equal(q_out, wanted_q)
    assert torch.equal(k_out, wanted_k)
    assert torch.equal(k_cache[1, :, 1], wanted_k[1])
    assert torch.equal(v_cache[2, :, 15], v[4])
    assert int(k_cache.any(-1).any(1).sum()) == 4  # four slots, one token was to be skipped


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, [("rope", {}), ("kv_write", {})]),
        ({"rotary_dim": 8}, [("rope", {"rotary_dim": 8}), ("kv_write", {})]),
        ({"kv_dtype": "float16"}, [("rope", {}), ("kv_write", {"kv_dtype": "float16"})]),
        (
            {"batch_invariant": True, "block_size": 32},
            [
                ("rope", {"batch_invariant": True}),
                ("kv_write", {"batch_invariant": True, "block_size": 32}),
            ],
        ),
    ],
)
def test_the_parts_are_bound_for_what_the_whole_was_asked_for(changes, parts):
    wanted = [spec_of(op, **part) for op, part in parts]
    assert list(spec_of("rope_kv_write", **changes).parts()) == wanted


def test_a_plain_op_has_no_parts():
    assert spec_of("rms_norm").parts() == ()


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize(
    "fused", [{}, {"add": True}, {"silu_mul": True}, {"rms_norm": True, "silu_mul": True}]
)
def test_a_composed_product_rounds_where_its_parts_do_and_packs_as_its_linear_does(fused, alias):
    """The parts work in fp64; only what is stored between them is rounded, to bf16."""
    given = []

    def linear(x, packed, *, out):
        given.append(packed)
        return out.copy_(x.double() @ packed[1].double().t())

    def silu_mul(x, *, out):
        gate, up = x.double().chunk(2, -1)
        return out.copy_(gate / (1 + torch.exp(-gate)) * up)

    runs = {"rms_norm": norm, "linear": linear, "silu_mul": silu_mul}
    bind = {op: lambda spec, device: BoundOp(run=runs[spec.op]) for op in runs}
    bind["linear"] = lambda spec, device: BoundOp(run=linear, pack=lambda w, b: ("packed", w))
    table = table_of(fake("parts", list(runs), bind=bind))
    spec = spec_of("fused_linear", dtype="bfloat16", in_features=16, out_features=8, **fused)
    bound = table.bind(spec)
    generator = torch.Generator().manual_seed(3)
    x, weight, norm_weight, residual = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((3, 16), (8, 16), (16,), (3, spec.out_columns))
    )
    wanted = x
    if spec.rms_norm:
        wanted = norm(x, norm_weight, eps=1e-5, out=torch.empty_like(x))
    wanted = (wanted.double() @ weight.double().t()).bfloat16()
    if spec.silu_mul:
        wanted = silu_mul(wanted, out=torch.empty_like(residual))
    if spec.add:
        wanted = residual + wanted
    arguments = {"norm_weight": norm_weight, "eps": 1e-5} if spec.rms_norm else {}
    if spec.add:
        arguments["residual"] = residual
    out = residual if alias else torch.empty_like(residual)
    assert bound.run(x, bound.pack(weight, None), **arguments, out=out) is out
    assert torch.equal(out, wanted)
    assert given[0][0] == "packed"
    assert given[0][1] is weight
