"""The shadow passes what is right and names what is wrong: op, place, step, row and element."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import drain, engine, greedy, prompts_of, save_shape, tokens_of
from support.shadowed import OTHER_WAYS, after, backend_of, right
from tvr import LLM
from tvr.backends.torch_ref import plugin
from tvr.conformance.attempt import attempt
from tvr.conformance.cases import cases
from tvr.conformance.inputs import make_call
from tvr.conformance.shadow import Shadow
from tvr.conformance.shadow_file import load, replay
from tvr.conformance.snapshot import take
from tvr.conformance.subject import Subject
from tvr.contract import DTYPES, OPS, BoundOp, DeviceFacts, SiluMulSpec
from tvr.core.ops import OpTable
from tvr.core.plugins import BackendManager
from tvr.errors import BackendUnavailable, ConfigError, OpFault

PROMPTS = prompts_of([20, 33, 7, 20])
NUM_LAYERS = 2
PARTS = ("rms_norm", "rope", "kv_write")
CPU = DeviceFacts(type="cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shadowed(checkpoint, *plugins, shadow=None, **settings):
    return engine(checkpoint, plugins=list(plugins), shadow=shadow or Shadow(), **settings)


def finding_of(checkpoint, *plugins, prompts=PROMPTS, tokens=4, **settings):
    """Return what a run finds, and check that it is what `generate` raises."""
    shadow = settings.pop("shadow", None) or Shadow()
    with shadowed(checkpoint, *plugins, shadow=shadow, **settings) as llm:
        with pytest.raises(OpFault) as error:
            llm.generate(prompts, greedy(tokens))
        assert str(error.value) == str(shadow.finding)
        assert "\n" not in str(error.value)
    return shadow.finding


def set_element(name, index, value):
    def spoil(args):
        args[name][index] = value

    return spoil


# --- what is right ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("served", [OPS, PARTS], ids=["whole", "parts"])
def test_the_reference_under_another_name_agrees(checkpoint, dtype, served):
    """In mixed steps, with prefix hits and with prompts cut into chunks."""
    shadow, params = Shadow(), greedy(6)
    backend = backend_of(dict.fromkeys(served, right))
    settings = {"dtype": dtype, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with shadowed(checkpoint, backend, shadow=shadow, **settings) as llm:
        first = tokens_of(llm.generate(PROMPTS, params))
        assert tokens_of(llm.generate(PROMPTS, params)) == first  # from the prefix cache
    assert {op for _, op in shadow.calls} <= set(served)
    assert shadow.finding is None
    whole = set(OPS) - {*PARTS[1:], "prepare_step", "sample", "top_logprobs"}
    wanted = {"rope", "rms_norm", "kv_write"} if served is PARTS else whole
    assert {op for _, op in shadow.calls} == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_right_ways_to_compute_agree(checkpoint, dtype):
    """They differ from the reference in the last bits, and then the oracle has the word."""
    shadow = Shadow()
    with shadowed(checkpoint, backend_of(OTHER_WAYS), shadow=shadow, dtype=dtype) as llm:
        llm.generate(PROMPTS, greedy(6))
    assert {op for _, op in shadow.calls} == set(OTHER_WAYS)


def test_tokens_are_those_without_a_shadow(checkpoint):
    with engine(checkpoint) as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy(8)))
    with shadowed(checkpoint, backend_of(dict.fromkeys(OPS, right))) as llm:
        assert tokens_of(llm.generate(PROMPTS, greedy(8))) == expected


def test_every_call_is_counted(checkpoint):
    shadow = Shadow()
    with shadowed(checkpoint, backend_of({"silu_mul": right}), shadow=shadow) as llm:
        llm.generate(PROMPTS[:1], greedy(5))
    assert shadow.calls == {("mine", "silu_mul"): 5 * NUM_LAYERS}
    assert shadow.summary() == "10 calls of 1 op agree with torch: silu_mul 10"
    assert shadow.summary("mine") == shadow.summary()


def tried(op, dtype, change, run=None):
    """Judge `run`, by default another right way, on a call whose inputs `change` has changed.

    `change` is given the call's arguments by name and may write its tensors.
    """
    case = next(case for case in cases(op, "smoke") if case.spec.dtype == dtype)
    call = make_call(case, torch.device("cpu"))
    change(call.args)
    snapshot = take(call)
    backend = backend_of({op: OTHER_WAYS[op] if run is None else lambda spec, bound: run(bound)})
    reference = snapshot.fresh_call()
    Subject(plugin, CPU).run(reference)
    mine = Subject(backend, CPU)
    return attempt(snapshot, call, lambda: mine.run(call), lambda: reference.written, "twice")


def first_input(op):
    return "q" if op.startswith(("rope", "attention")) else "x"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OTHER_WAYS)
def test_rows_that_are_not_finite_are_no_fault_of_a_right_op(op, dtype, value):
    outcome = tried(op, dtype, lambda args: args[first_input(op)][0].view(-1)[3:5].fill_(value))
    assert not outcome.failed, outcome


@pytest.mark.parametrize("op", ["silu_mul", "linear"])
def test_a_result_too_large_for_its_dtype_is_no_fault(op):
    """Where one program rounds to the largest number another rounds to infinity."""
    outcome = tried(op, "float16", lambda args: args["x"].mul_(8000.0))
    assert not outcome.reference["out"].isfinite().all()
    assert not outcome.failed, outcome


def test_numbers_that_cancel_may_leave_the_error_of_fp32():
    """Far over what the suite allows a sum without such; the reference is no nearer."""

    def massive(args):
        args["x"][:, 3], args["x"][:, 40] = 1000.0, -1000.0
        args["weight"][:, 40] = args["weight"][:, 3]

    def in_pieces(bound):
        def run(x, packed, *, out):
            weight = packed[0][: out.shape[1], : x.shape[1]]
            pieces = zip(x.split(8, dim=1), weight.split(8, dim=1), strict=True)
            return out.copy_(sum(x @ w.t() for x, w in pieces))

        return BoundOp(run=run)

    outcome = tried("linear", "float32", massive, in_pieces)
    assert not torch.equal(outcome.found["out"], outcome.reference["out"])
    assert not outcome.failed, outcome


@pytest.mark.parametrize("op", ["rms_norm", "silu_mul", "linear", "attention_decode"])
@pytest.mark.parametrize(("has", "gives"), [(math.nan, 0.0), (1.0, math.nan), (1.0, math.inf)])
def test_a_nan_that_is_lost_or_made_is_a_fault(op, has, gives):
    def run(bound):
        def wrong(*args, out, **kwargs):
            bound.run(*args, out=out, **kwargs)[0].fill_(gives)
            return out

        return BoundOp(run=wrong)

    outcome = tried(op, "float32", lambda args: args[first_input(op)][0].fill_(has), run)
    assert outcome.fault is not None
    assert outcome.fault.index[0] == 0


def test_packed_weights_are_compared_with_the_weights_they_were_made_of(checkpoint):
    """Batch invariant, so that the reference packs too, in another way."""
    shadow = Shadow()
    backend = backend_of({"linear": right})
    with shadowed(checkpoint, backend, shadow=shadow, batch_invariant=True) as llm:
        llm.generate(PROMPTS, greedy(4))
    assert shadow.calls["mine", "linear"]


def with_workspace(log):
    """Return what binds an op that computes only if it was planned and given its workspace."""

    def make(spec, bound):
        state = {}

        def plan(step):
            state["planned"] = step.num_tokens

        def run(*args, **kwargs):
            step = next((a for a in args if hasattr(a, "num_tokens")), None)
            assert step is None or state["planned"] == step.num_tokens
            assert len(state["workspace"]) == 64
            log.append(spec.op)
            return bound.run(*args, **kwargs)

        return BoundOp(
            run=run,
            plan=plan,
            workspace_bytes=lambda bounds: 2 * bounds.max_num_seqs,
            attach=lambda workspace: state.update(workspace=workspace),
        )

    return make


def test_backend_and_reference_each_have_a_plan_and_a_workspace(checkpoint):
    logs = [], []
    ops = ("attention_decode", "attention_prefill", "silu_mul")
    mine, other = (
        backend_of({op: with_workspace(log) for op in ops}, name)
        for log, name in zip(logs, ("mine", "other"), strict=True)
    )
    with shadowed(checkpoint, mine, other, shadow=Shadow("other"), max_num_seqs=32) as llm:
        llm.generate(PROMPTS, greedy(4))
    assert logs[0] == logs[1] != []


# --- what is wrong ----------------------------------------------------------------------------

#: op -> (output, index, call number, site, step). With one prompt of 20 tokens, each op is called
#: once a layer and step, but for those named in the comments.
PLANTED = {
    "rms_norm": ("out", (3, 5), 0, "layers.0.input_layernorm", 0),
    "add_rms_norm": ("out", (0, 7), 4, "layers.0.post_attention_layernorm", 1),  # 2 a layer
    "rope": ("k_out", (11, 1, 2), 1, "layers.1.self_attn", 0),
    "kv_write": ("v_cache", (1, 0, 2, 3), 1, "layers.1.self_attn", 0),
    "rope_kv_write": ("q_out", (0, 2, 4), 3, "layers.1.self_attn", 1),
    "attention_prefill": ("out", (13, 1, 3), 1, "layers.1.self_attn", 0),
    "attention_decode": ("out", (0, 3, 1), 3, "layers.1.self_attn", 2),
    "silu_mul": ("out", (2, 40), 1, "layers.1.mlp.act_fn", 0),
    "linear": (
        "out",
        (0, 33),
        4 * NUM_LAYERS + 2,
        "layers.0.self_attn.o_proj",
        1,
    ),  # 4, and lm_head
    "argmax": ("out", (0,), 2, "sampler", 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", PLANTED)
def test_a_planted_fault_is_named_with_its_place_and_element(checkpoint, op, dtype):
    output, index, call, site, step = PLANTED[op]
    value = 3 if op == "argmax" else 40.0
    backend = backend_of({op: after(set_element(output, index, value), call=call)})
    finding = finding_of(checkpoint, backend, prompts=PROMPTS[:1], dtype=dtype)
    assert (finding.op, finding.backend) == (op, "mine")
    assert (finding.site, finding.step) == (site, step)
    assert (finding.fault.output, finding.fault.index) == (output, index)
    assert finding.fault.found == value
    assert finding.fault.wanted != value
    assert f"{op} of backend 'mine' at {site}, step {step}: row " in str(finding)


def test_a_fault_in_a_mixed_step_is_named_by_sequence_and_position(checkpoint):
    """A prefill's rows come behind the decodes of the step."""
    backend = backend_of({"attention_prefill": after(set_element("out", (4, 0, 0), 9.0), call=2)})
    shadow = Shadow()
    with shadowed(checkpoint, backend, shadow=shadow) as llm:
        llm.add_request("first", PROMPTS[0], greedy(8))
        llm.step()
        llm.add_request("second", PROMPTS[1], greedy(8))
        with pytest.raises(OpFault):
            drain(llm)
    assert shadow.finding.row == "row 4 (sequence 1 of the step, position 4)"


def test_a_fault_too_small_for_one_element_shows_in_its_row(checkpoint):
    def scale(args):
        args["out"][3] *= 1.02

    finding = finding_of(checkpoint, backend_of({"linear": after(scale)}), dtype="bfloat16")
    assert finding.fault.index[0] == 3
    assert "the row's relative Frobenius error is 0.02" in str(finding)


def test_the_part_of_a_composed_op_is_named_not_the_whole(checkpoint):
    backend = backend_of(
        {"rope": right, "kv_write": after(set_element("k_cache", (1, 0, 0, 0), 9.0))}
    )
    finding = finding_of(checkpoint, backend)
    assert (finding.op, finding.site) == ("kv_write", "layers.0.self_attn")


def test_a_write_into_another_sequences_block_is_found(checkpoint):
    """It would show up as another request's garbage, many steps later."""

    def stray(args):
        args["k_cache"][0, :, 3] = 7.0

    backend = backend_of({"kv_write": after(stray, call=NUM_LAYERS * 3), "rope": right})
    finding = finding_of(checkpoint, backend, tokens=8)
    assert finding.fault.output == "k_cache"
    assert finding.fault.index == (0, 0, 3, 0)
    assert finding.row == "a slot that no row was to be written to"


def test_a_write_to_slot_minus_one_is_found_at_the_pools_end(checkpoint):
    def stray(args):
        args["v_cache"][-1, :, -1] = 7.0

    backend = backend_of({"rope_kv_write": after(stray)})
    finding = finding_of(checkpoint, backend)
    assert finding.fault.index == (127, 0, 15, 0)


@pytest.mark.parametrize(
    ("op", "name"),
    [("silu_mul", "x"), ("attention_decode", "k_cache"), ("attention_prefill", "block_table")],
)
def test_damage_to_an_input_is_found(checkpoint, op, name):
    """What reads it next would do so in the backend and in the reference alike."""

    def damage(args):
        tensor = args[name] if name in args else getattr(args["step"], name)
        tensor.view(-1)[-1 if name == "x" else 0] += 1

    if name == "k_cache":  # block 0 holds the first prompt

        def damage(args):
            args["k_cache"][args["step"].block_table[0, 0]] += 1

    finding = finding_of(checkpoint, backend_of({op: after(damage)}))
    assert finding.problem == f"wrote its input {name}"


def test_returning_another_tensor_is_found(checkpoint):
    def copies(spec, bound):
        return BoundOp(run=lambda logits, *, out: bound.run(logits, out=out).clone())

    finding = finding_of(checkpoint, backend_of({"argmax": copies}))
    assert finding.problem == "returned Tensor instead of out itself"


def test_an_op_that_raises_is_named(checkpoint):
    def raising(spec, bound):
        def run(x, *, out):
            raise RuntimeError("no such\nwarp")

        return BoundOp(run=run)

    finding = finding_of(checkpoint, backend_of({"silu_mul": raising}))
    assert finding.problem == "raised RuntimeError: no such warp"
    assert load("tvr-shadow-silu_mul.safetensors").finding.endswith(finding.problem)
    result = replay("tvr-shadow-silu_mul.safetensors", backend_of({"silu_mul": raising}))
    assert result.failed
    assert result.detail == "raised RuntimeError: no such warp"


def raises(spec, bound):
    def run(x, *, out):
        raise RuntimeError("the queue is full")

    return BoundOp(run=run)


def test_when_both_raise_it_is_said(checkpoint):
    mine, other = backend_of({"silu_mul": raises}), backend_of({"silu_mul": raises}, "other")
    finding = finding_of(checkpoint, mine, other, shadow=Shadow("other"))
    assert finding.problem.endswith("; the reference raises too: RuntimeError: the queue is full")
    result = replay("tvr-shadow-silu_mul.safetensors", mine)
    assert result.failed
    result = replay("tvr-shadow-silu_mul.safetensors", "torch")
    assert result.outcome == "skipped", "there is no result to compare with"
    assert "the reference raised too" in result.detail


def test_a_reference_that_raises_is_no_fault_of_the_backend(checkpoint):
    mine, other = backend_of({"silu_mul": right}), backend_of({"silu_mul": raises}, "other")
    shadow = Shadow("other")
    with shadowed(checkpoint, mine, other, shadow=shadow) as llm:
        (output,) = llm.generate(PROMPTS[:1], greedy(4))
    assert shadow.finding is None
    assert "the reference raised RuntimeError: the queue is full" in output.outputs[0].error
    with pytest.raises(ConfigError, match="no op was called that the reference could repeat"):
        shadow.summary("mine")


def test_every_request_ends_and_no_step_runs_after_a_fault(checkpoint):
    shadow = Shadow()
    backend = backend_of({"silu_mul": after(set_element("out", (0, 0), 9.0))})
    with shadowed(checkpoint, backend, shadow=shadow) as llm:
        llm.add_request("x", PROMPTS[0], greedy(8))
        with pytest.raises(OpFault):
            llm.step()
        (output,) = llm.step()
        assert output.finished
        assert output.outputs[0].error == str(shadow.finding)
        with pytest.raises(OpFault):
            llm.generate(PROMPTS, greedy(4))
        assert not llm.has_unfinished_requests()


# --- what cannot be compared ------------------------------------------------------------------


def test_a_shadow_with_nothing_to_compare_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="no other backend served an op"):
        LLM(checkpoint, num_blocks=64, backend="torch", shadow=Shadow())


def test_a_run_that_compared_nothing_is_no_success(checkpoint):
    """One token needs no decode."""
    shadow = Shadow()
    with shadowed(checkpoint, backend_of({"attention_decode": right}), shadow=shadow) as llm:
        llm.generate(PROMPTS, greedy(1))
    with pytest.raises(ConfigError, match="has compared no call"):
        shadow.summary()


def test_ops_that_the_reference_cannot_repeat_are_told(checkpoint):
    mine, other = backend_of(dict.fromkeys(OPS, right)), backend_of({"silu_mul": right}, "other")
    shadow = Shadow("other")
    with shadowed(checkpoint, mine, other, shadow=shadow) as llm:
        llm.generate(PROMPTS, greedy(2))
    assert set(shadow.calls) == {("mine", "silu_mul")}
    assert "argmax of mine was not compared: does not implement argmax" in shadow.summary()
    with pytest.raises(ConfigError, match="of backend 'torch'"):
        shadow.summary("torch")


@pytest.mark.parametrize("shadow", ["torch", Shadow, 3])
def test_what_is_no_shadow_is_refused(checkpoint, shadow):
    with pytest.raises(ConfigError, match=r"give a tvr\.conformance\.shadow\.Shadow"):
        LLM(checkpoint, shadow=shadow)


def test_an_unknown_reference_is_refused_before_the_weights_are_read(checkpoint):
    with pytest.raises(BackendUnavailable, match="'nobody' is not known"):
        LLM(checkpoint, shadow=Shadow("nobody"), load_format="dummy")


def test_a_shadow_watches_one_engine(checkpoint):
    shadow, backend = Shadow(), backend_of({"silu_mul": right})
    with shadowed(checkpoint, backend, shadow=shadow) as llm:
        assert llm.config.max_lag == 0
    with pytest.raises(ConfigError, match="watches one engine"):
        LLM(checkpoint, plugins=[backend], shadow=shadow)


def test_without_a_shadow_the_model_calls_the_bare_ops():
    table = OpTable(BackendManager(device=CPU), CPU)
    spec = SiluMulSpec(dtype="float32", intermediate_size=8)
    assert table.bind_at(spec, "layers.0.mlp.act_fn") is table.bind(spec)


# --- the file ---------------------------------------------------------------------------------


def names_of(call):
    tensors = {name: value for name, value in call.args.items() if isinstance(value, torch.Tensor)}
    return tensors | {f"step.{name}": t for name, t in call.read.items() if name not in tensors}


@pytest.mark.parametrize("op", PLANTED)
def test_a_kept_call_is_the_call_that_was_made(checkpoint, op):
    output, index, call, _, _ = PLANTED[op]
    value = 3 if op == "argmax" else 40.0
    seen = []

    def spoil(args):
        seen.append({n: a.clone() for n, a in args.items() if isinstance(a, torch.Tensor)})
        args[output][index] = value

    finding = finding_of(checkpoint, backend_of({op: after(spoil, call=call)}), prompts=PROMPTS[:1])
    path = Path(f"tvr-shadow-{op}.safetensors")
    assert f"`tvr conformance --backend mine --replay {path}`" in finding.kept
    record = load(path)
    kept = record.snapshot.call
    # In place, inputs are gone by now; slots are renumbered, caches and the table of angles cut.
    changed = {*kept.written, *record.snapshot.aliases.values(), "slot_mapping"}
    for name in seen[0].keys() - changed - {"k_cache", "v_cache"}:
        assert torch.equal(kept[name], seen[0][name][: len(kept[name])]), name
    assert record.finding.startswith(f"{op} of backend 'mine' at {finding.site}")
    assert set(record.found) == set(record.reference) == set(kept.written)
    assert not torch.equal(record.found[output], record.reference[output])
    again = load(path)
    for name, tensor in names_of(kept).items():
        assert torch.equal(names_of(again.snapshot.call)[name].nan_to_num(7), tensor.nan_to_num(7))
    assert replay(path, "torch").outcome == "passed"


def test_a_fault_shows_again_when_its_file_is_replayed(checkpoint):
    """The slices of one wide qkv row are such slices again."""

    def ignores_the_row_stride(spec, bound):
        def run(q, k, v, *args, **kwargs):
            flat = torch.as_strided(v, v.shape, torch.empty(v.shape).stride(), v.storage_offset())
            return bound.run(q, k, flat, *args, **kwargs)

        return BoundOp(run=run)

    backend = backend_of({"rope_kv_write": ignores_the_row_stride})
    finding = finding_of(checkpoint, backend, shadow=Shadow(file="kept.safetensors"))
    assert finding.fault.output == "v_cache"
    result = replay("kept.safetensors", backend)
    assert (result.check, result.op) == ("shadow_replay", "rope_kv_write")
    assert result.outcome == "failed"
    assert result.detail.startswith("v_cache[")
    assert replay("kept.safetensors", backend_of({"rope_kv_write": right})).outcome == "passed"
    skipped = replay("kept.safetensors", backend_of({"rope": right}))
    assert (skipped.outcome, skipped.detail) == ("skipped", "does not implement rope_kv_write")


def test_a_backend_that_ignores_the_block_table_fails_again_from_the_file(checkpoint):
    def first_blocks(spec, bound):
        def run(q, k_cache, v_cache, step, **kwargs):
            table = torch.arange(step.block_table.shape[1], dtype=torch.int32)
            step = replace(step, block_table=table.expand_as(step.block_table).contiguous())
            return bound.run(q, k_cache, v_cache, step, **kwargs)

        return BoundOp(run=run)

    backend = backend_of({"attention_decode": first_blocks})
    finding_of(checkpoint, backend, shadow=Shadow(file="kept.safetensors"))
    assert replay("kept.safetensors", backend).failed


def test_a_file_holds_only_the_blocks_in_use(checkpoint):
    backend = backend_of({"attention_decode": after(set_element("out", (0, 0, 0), 9.0))})
    finding_of(checkpoint, backend, prompts=PROMPTS[:1], num_blocks=4096)
    tensors = load_file("tvr-shadow-attention_decode.safetensors")
    assert len(tensors["in.k_cache"]) == 3  # 21 tokens, and the block of NaN
    assert os.path.getsize("tvr-shadow-attention_decode.safetensors") < 100_000


def test_a_file_that_cannot_be_written_does_not_hide_the_fault(checkpoint):
    shadow = Shadow(file="nowhere/kept.safetensors")
    backend = backend_of({"silu_mul": after(set_element("out", (0, 0), 9.0))})
    finding = finding_of(checkpoint, backend, shadow=shadow)
    assert finding.fault.index == (0, 0)
    assert finding.kept.startswith("not kept in nowhere/kept.safetensors: ")


@pytest.fixture
def kept(checkpoint):
    backend = backend_of({"attention_decode": after(set_element("out", (0, 0, 0), 9.0))})
    finding_of(checkpoint, backend, shadow=Shadow(file="kept.safetensors"))
    return Path("kept.safetensors")


def rewritten(path, tensors=None, **changes):
    """Write the file again with other tensors, or with changes to its description."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["tvr"]) | changes
    save_file(load_file(path) if tensors is None else tensors, path, {"tvr": json.dumps(about)})


def without(tensors, name):
    return {n: t for n, t in tensors.items() if n != name}


DAMAGES = {
    "no file": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "text": lambda path: path.write_text("not a safetensors file at all"),
    "another's": lambda path: save_file({"x": torch.zeros(3)}, path),
    "version": lambda path: rewritten(path, version=2),
    "op": lambda path: rewritten(path, op="sort"),
    "spec": lambda path: rewritten(path, spec={"dtype": "float32"}),
    "bounds": lambda path: rewritten(path, bounds={}),
    "strides": lambda path: rewritten(path, strides={"nobody": [1]}),
    "no q": lambda path: rewritten(path, without(load_file(path), "in.q")),
    "no table": lambda path: rewritten(path, without(load_file(path), "step.block_table")),
    "shape": lambda path: rewritten(path, load_file(path) | {"found.out": torch.zeros(3)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(kept, damage):
    DAMAGES[damage](kept)
    with pytest.raises(ConfigError) as error:
        replay(kept, "torch")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("kept.safetensors ")
