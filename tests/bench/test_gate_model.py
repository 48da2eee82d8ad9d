"""Which engines get a number: those whose logits are the reference's, at prefill and decode."""

from __future__ import annotations

import pytest
import torch

from support.bench_models import engine_with, open_model, save_config, with_fault
from support.fault import Fault
from support.faults import FAULTS
from support.faults_engine import ENGINE_FAULTS
from tvr.backends.torch_ref import plugin
from tvr.bench.gate_model import NUM_PROMPT, NUM_TOKENS, ModelGate, gate_lengths
from tvr.conformance.ledger import CheckFailed
from tvr.errors import BackendUnavailable

BATCH = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def gates(folder):
    """A gate for each dtype, made once: it is what takes the time."""
    return {d: ModelGate(open_model(folder, dtype=d)) for d in ("float32", "float16", "bfloat16")}


def judged(gates, folder, backend, dtype="float32", batch=BATCH):
    llm = engine_with(open_model(folder, dtype=dtype), backend)
    try:
        return gates[dtype].judge(llm, batch)
    finally:
        llm.close()


def refused(*args, **kwargs):
    with pytest.raises(CheckFailed) as caught:
        judged(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def planted(op, name):
    every = (*FAULTS, *ENGINE_FAULTS)
    return next(fault for fault in every if (fault.op, fault.name) == (op, name))


def picks_the_second_best(right, spec, a):
    best = right()
    rest = a["logits"].scatter(1, best[:, None], float("-inf"))
    a["out"].copy_(rest.argmax(dim=-1))
    return a["out"]


def turns_a_row_to_nan(right, spec, a):
    right()
    a["out"][-1] = torch.nan
    return a["out"]


def adds_noise(size):
    def is_noisy(right, spec, a):
        right()
        g = torch.Generator().manual_seed(0)
        noise = torch.randn(a["out"].shape, generator=g) * size
        return a["out"].copy_((a["out"].float() + noise).to(a["out"].dtype))

    return is_noisy


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_reference_passes_in_every_dtype(gates, folder, dtype):
    found = judged(gates, folder, plugin, dtype)
    gate = gates[dtype]
    assert found["tokens"] == NUM_TOKENS
    assert found["max_error"] <= found["limit"]
    assert found["limit"] == pytest.approx(gate.limit, rel=1e-3)
    if dtype == "float32":
        assert found["other_tokens"] == 0
    else:
        assert gate.limit == 1.5 * gate.reference_error
        assert found["max_error"] > 0


def test_half_precision_is_measured_by_its_own_rounding(gates):
    errors = {dtype: gate.reference_error for dtype, gate in gates.items()}
    assert errors["float32"] == 0
    assert 2 * errors["float16"] < errors["bfloat16"] < 32 * errors["float16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "name", "way"),
    [
        ("rope", "pairs_neighbours", "prefill"),
        ("rope_kv_write", "turns_a_single_row_the_other_way", "decode"),
        ("attention_prefill", "forgets_the_causal_mask", "prefill"),
        ("attention_decode", "ignores_the_table_order", "decode"),
        ("attention_decode", "leaves_out_the_scale", "decode"),
        ("attention_decode", "maps_heads_by_repeat", "decode"),
        ("kv_write", "swaps_k_and_v", "prefill"),
        ("silu_mul", "swaps_gate_and_up", "prefill"),
    ],
)
def test_a_wrong_backend_is_refused_by_the_way_that_shows_it(gates, folder, dtype, op, name, way):
    reason = refused(gates, folder, with_fault(planted(op, name)), dtype)
    assert reason.startswith(f"{way}: a logit is ")
    assert "off the fp32 reference's" in reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_argmax_is_refused_though_the_logits_are_right(gates, folder, dtype):
    fault = Fault(check="", op="argmax", fault=picks_the_second_best)
    reason = refused(gates, folder, with_fault(fault), dtype)
    assert reason.startswith("decode: token ")
    assert "has the largest logit" in reason


def test_a_nan_is_over_any_limit(gates, folder):
    fault = Fault(check="", op="silu_mul", fault=turns_a_row_to_nan)
    assert refused(gates, folder, with_fault(fault), "bfloat16").startswith("prefill: ")


def test_what_raises_is_told_with_the_ops_name(gates, folder):
    def fails(right, spec, a):
        raise RuntimeError("worn out")

    reason = refused(gates, folder, with_fault(Fault(check="", op="attention_decode", fault=fails)))
    assert "RuntimeError: worn out" in reason
    assert "attention_decode of backend 'faulty'" in reason


@pytest.mark.parametrize(("size", "passes"), [(2e-4, True), (0.1, False)])
def test_half_precision_may_be_as_noisy_as_it_is_and_no_more(gates, folder, size, passes):
    backend = with_fault(Fault(check="", op="attention_decode", fault=adds_noise(size)))
    if passes:
        judged(gates, folder, backend, "bfloat16")
    else:
        refused(gates, folder, backend, "bfloat16")


def test_fp32_tolerates_no_such_noise(gates, folder):
    backend = with_fault(Fault(check="", op="attention_decode", fault=adds_noise(2e-4)))
    assert refused(gates, folder, backend).startswith("decode: a logit is ")


def test_a_mix_up_of_rows_shows_in_a_batch_and_not_alone(gates, folder):
    def swaps_rows(right, spec, a):
        right()
        a["out"].copy_(a["out"].flip(0))
        return a["out"]

    backend = with_fault(Fault(check="", op="attention_decode", fault=swaps_rows))
    judged(gates, folder, backend, batch=1)
    assert refused(gates, folder, backend).startswith("decode: ")


def test_a_fault_of_running_ahead_shows_in_generation_alone(gates, folder, monkeypatch):
    """Led sequences wait for the host at each token; those that are timed do not."""
    from tvr.core.runner import ModelRunner

    run = ModelRunner._run

    def loses_the_last_token(self, packed, resets, extras):
        if not extras.processed and packed.num_decodes:
            self._tables.last_token[0] = 7
        return run(self, packed, resets, extras)

    monkeypatch.setattr(ModelRunner, "_run", loses_the_last_token)
    reason = refused(gates, folder, plugin)
    assert reason.startswith("generation: token ")
    assert "comes where fp32 has" in reason


def test_a_short_context_has_a_shorter_text(tmp_path):
    folder = save_config(tmp_path / "short", max_position_embeddings=20)
    model = open_model(folder)
    assert gate_lengths(model) == (10, 10)
    gate = ModelGate(model)
    llm = engine_with(model, plugin)
    assert gate.judge(llm, 2)["tokens"] == 10
    llm.close()
    assert gate_lengths(open_model(tmp_path / "short", max_model_len=2)) == (1, 1)
    assert NUM_PROMPT + NUM_TOKENS <= 128


def test_a_long_context_takes_no_more_of_the_references(tmp_path):
    """Their pool holds the text, and would be too small for one request of that length."""
    folder = save_config(tmp_path / "long", max_position_embeddings=1 << 17)
    gate = ModelGate(open_model(folder, dtype="bfloat16", max_model_len=1 << 17))
    assert len(gate.text.tokens) == NUM_TOKENS


def test_the_reference_must_be_torch_alone(tmp_path, monkeypatch):
    from tvr.core.ops import OpTable

    monkeypatch.setattr(OpTable, "served", lambda self: {"rope": ["torch + other"]})
    with pytest.raises(BackendUnavailable, match="rope: torch \\+ other"):
        ModelGate(open_model(save_config(tmp_path / "pinned")))
