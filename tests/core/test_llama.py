"""The model calls its ops as the contract says; what it computes is tested against transformers."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.batch import PagedRun
from support.table import WrappedTable
from tvr.cli.backends import op_specs
from tvr.contract import OPS, LinearSpec
from tvr.core.config import ModelConfig
from tvr.core.kv_cache import KVCache
from tvr.core.llama import LlamaForCausalLM
from tvr.core.step_ops import StepOps
from tvr.core.weights import dummy_weights
from tvr.errors import CapacityError

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    attention_bias=True,
)
NUM_PRODUCTS = 4 * CONFIG.num_layers + 1


def build(
    table: WrappedTable, *, batch_invariant: bool = False, dtype: str = "float32"
) -> LlamaForCausalLM:
    weights = dummy_weights(CONFIG, dtype=dtype, device="cpu", seed=0)
    return LlamaForCausalLM(
        CONFIG, weights, table, block_size=16, batch_invariant=batch_invariant, max_position=128
    )


def counting_table(
    calls: Counter[str], table: Callable[..., WrappedTable] = WrappedTable
) -> WrappedTable:
    def wrap(run, spec):
        def counted(*args, **kwargs):
            limit = getattr(spec, "max_rows", None)
            calls[spec.op if limit is None else f"{spec.op}<={limit}"] += 1
            return run(*args, **kwargs)

        return counted

    ops = ("rms_norm", "add_rms_norm", "rope_kv_write", "attention_decode", "attention_prefill")
    return table({op: wrap for op in (*ops, "silu_mul", "linear", "fused_linear")})


class Unfused(WrappedTable):
    """A table in which no backend serves a product whole that has one of `parts` fused with it."""

    parts: frozenset[str] = frozenset({"rms_norm", "add"})

    def serves_whole(self, spec, *, instead_of):
        fused = {name for name in ("rms_norm", "silu_mul", "add") if getattr(spec, name)}
        return not self.parts & fused and super().serves_whole(spec, instead_of=instead_of)


@pytest.mark.parametrize(("num_rows", "op"), [(1, "linear<=8"), (8, "linear<=8"), (9, "linear")])
def test_products_go_by_row_count_to_the_op_bound_for_it(num_rows, op):
    calls: Counter[str] = Counter()
    run = PagedRun(build(counting_table(calls, Unfused)))
    run.step(prefill={0: list(range(num_rows))})
    assert {k: n for k, n in calls.items() if "linear" in k} == {op: NUM_PRODUCTS}


def test_one_row_of_a_layer_takes_four_products_rope_and_attention():
    calls: Counter[str] = Counter()
    run = PagedRun(build(counting_table(calls)))
    run.step(prefill={0: [0]})
    calls.clear()
    run.step(decode={0: 0})
    layers = CONFIG.num_layers
    assert calls == {
        "fused_linear<=1": 4 * layers,
        "rope_kv_write": layers,
        "attention_decode": layers,
        "rms_norm": 1,
        "linear<=8": 1,  # the LM head's
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "parts", [("rms_norm", "add"), ("rms_norm",), ("silu_mul",), ("add",)], ids="-".join
)
def test_what_is_fused_changes_no_bit_of_the_reference(parts, dtype, monkeypatch):
    """Any of a layer's products may be fused, whichever others are; in steps of all sizes."""
    monkeypatch.setattr(Unfused, "parts", frozenset(parts))
    runs = [PagedRun(build(kind(), dtype=dtype)) for kind in (WrappedTable, Unfused)]
    steps = [
        {"prefill": {0: list(range(5)), 1: [7, 8]}},
        {"prefill": {2: list(range(20))}, "decode": {0: 3}},
        {"decode": {0: 1, 1: 2, 2: 3}},
        {"decode": {2: 9}},
    ]
    for step in steps:
        fused, plain = (run.step(**step) for run in runs)
        for name, logits in fused.items():
            assert torch.equal(logits, plain[name])


def test_what_backends_explain_are_specs_that_a_model_asks_for():
    table = WrappedTable()
    build(table)
    sizes = {"dtype": "float32", "block_size": 16, "vocab_size": CONFIG.vocab_size}
    StepOps.bind(table, **sizes)
    asked = {*table.specs, *(part for spec in table.specs for part in spec.parts())}
    explained = op_specs(CONFIG, "float32", 16)
    assert [spec for spec in explained if spec not in asked] == []
    assert {spec.op for spec in explained} == set(OPS)


def test_a_batch_invariant_model_asks_for_no_fused_product():
    table = WrappedTable()
    build(table, batch_invariant=True)
    assert "fused_linear" not in {spec.op for spec in table.specs}


def test_a_mixed_step_calls_each_op_once_a_layer():
    calls: Counter[str] = Counter()
    run = PagedRun(build(counting_table(calls)))
    run.step(prefill={0: [1, 2, 3]})
    calls.clear()
    run.step(decode={0: 4}, prefill={1: list(range(20))})
    layers = CONFIG.num_layers
    assert calls == {
        "rms_norm": 1,
        "add_rms_norm": 2 * layers,
        "rope_kv_write": layers,
        "attention_decode": layers,
        "attention_prefill": layers,
        "silu_mul": layers,
        "linear": NUM_PRODUCTS,
    }


def test_a_batch_invariant_model_binds_invariant_ops_and_one_op_a_product():
    table = WrappedTable()
    build(table, batch_invariant=True)
    assert all(spec.batch_invariant for spec in table.specs)
    products = [spec for spec in table.specs if isinstance(spec, LinearSpec)]
    assert len(products) == NUM_PRODUCTS
    assert {spec.max_rows for spec in products} == {None}


def test_a_batch_invariant_model_gives_the_same_bits_beside_any_neighbour():
    model = build(WrappedTable(), batch_invariant=True)
    alone, together = PagedRun(model), PagedRun(model, seed=1)
    prompts = {i: [(7 * i + j) % 50 for j in range(5 + 9 * i)] for i in range(4)}
    batch = together.step(prefill=prompts)
    for i, ids in prompts.items():
        assert torch.equal(batch[i], alone.step(prefill={i: ids})[i])
    batch = together.step(decode={i: i for i in prompts})
    for i in prompts:
        assert torch.equal(batch[i], alone.step(decode={i: i})[i])


def test_activations_stay_at_one_address_once_the_largest_step_ran():
    """A captured graph replays on them."""
    addresses: list[set[int]] = []

    def wrap(run, spec):
        def noted(x, residual, *args, **kwargs):
            if x.shape[0] > 1:  # the final norm has rows of its own
                addresses[-1] |= {x.data_ptr(), residual.data_ptr(), kwargs["out"].data_ptr()}
            return run(x, residual, *args, **kwargs)

        return noted

    run = PagedRun(build(WrappedTable({"add_rms_norm": wrap})), all_logits=False)
    for i, length in enumerate([50, 13, 50, 12]):
        addresses.append(set())
        run.step(prefill={i: list(range(length))})
    assert len(addresses[0]) == 3
    assert all(step == addresses[0] for step in addresses)


def test_only_logit_rows_reach_the_lm_head():
    rows: list[int] = []

    def wrap(run, spec):
        def noted(x, packed, *, out):
            if spec.out_features == CONFIG.vocab_size:
                rows.append(x.shape[0])
            return run(x, packed, out=out)

        return noted

    model = build(WrappedTable({"linear": wrap}))
    prompts = {0: list(range(30)), 1: list(range(20)), 2: [7]}
    last = PagedRun(model, all_logits=False).step(prefill=prompts)
    assert rows == [3]
    every = PagedRun(model).step(prefill=prompts)
    assert rows == [3, 51]
    for i in prompts:
        torch.testing.assert_close(last[i], every[i][-1:])


def test_dummy_weights_keep_activations_and_logits_near_one():
    config = replace(CONFIG, hidden_size=512, num_layers=8, intermediate_size=1024)
    weights = dummy_weights(config, dtype="float16", device="cpu", seed=0)
    model = LlamaForCausalLM(config, weights, WrappedTable(), block_size=16, max_position=64)
    logits = PagedRun(model).step(prefill={0: list(range(40))})[0].float()
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_cache_has_the_contracts_layout_and_the_size_it_states(dtype):
    cache = KVCache.allocate(CONFIG, 5, 8, dtype, "cpu")
    assert len(cache.layers) == CONFIG.num_layers
    pools = [pool for pair in cache.layers for pool in pair]
    assert {tuple(pool.shape) for pool in pools} == {(5, 2, 8, 16)}
    assert len({pool.data_ptr() for pool in pools}) == 2 * CONFIG.num_layers
    num_bytes = sum(pool.numel() * pool.element_size() for pool in pools)
    assert num_bytes == 5 * CONFIG.kv_bytes_per_block(8, dtype)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_kv_cache_on_the_cpu_takes_memory_only_as_it_is_used():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    num_blocks = 2**28 // CONFIG.kv_bytes_per_block(16, "bfloat16")
    cache = KVCache.allocate(CONFIG, num_blocks, 16, "bfloat16", "cpu")
    assert resident_bytes() - before < 2**24
    assert not cache.layers[0][0].any()


def test_a_kv_cache_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(CapacityError, match=r"blocks of 16 tokens takes .* MiB, which cpu"):
        KVCache.allocate(CONFIG, 2**45, 16, "float32", "cpu")
