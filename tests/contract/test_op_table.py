"""The op table: who serves an op, and what core does with what is bound."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from support.fakes import BOX, CPU, GPU, fake, manager_of, no_run, table_of
from support.specs import spec_of
from tvr.contract import OPS, BoundOp, Bounds, Box
from tvr.core.ops import ALIGNMENT, OpTable, PassedOver
from tvr.core.plugins import PluginConfig
from tvr.errors import BackendUnavailable, ConfigError, PluginError, UnsupportedSpec

BOUNDS = Bounds(max_num_seqs=4, max_num_tokens=64, max_seq_len=128, max_q_len=32)


def raising(error):
    def bind(spec, device):
        raise error

    return bind


def nothing(spec, device):
    return None


# Falling through.


@pytest.mark.parametrize("op", OPS)
def test_the_best_ranked_backend_serves_every_op_it_has(op):
    a, b = fake("a"), fake("b")
    table = table_of(a, b)
    assert table.bind(spec_of(op)).run is no_run
    assert table.served() == {op: ["a"]}
    assert not b.asked


def test_a_partial_backend_serves_what_it_has_and_the_rest_falls_through():
    table = table_of(fake("a", ["rope"]), fake("b", ["rope", "argmax"]), fake("c"))
    for op in ("rope", "argmax", "silu_mul"):
        table.bind(spec_of(op))
    assert table.served() == {"rope": ["a"], "argmax": ["b"], "silu_mul": ["c"]}


def test_an_op_may_be_served_by_several_backends_for_several_specs():
    table = table_of(fake("a", {"rope": [Box(dtypes=["float32"], devices=["cpu"])]}), fake("b"))
    table.bind(spec_of("rope"))
    table.bind(spec_of("rope", dtype="bfloat16"))
    assert table.served() == {"rope": ["a", "b"]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (nothing, "declares support, but tvr_bind_rope returned None"),
        (raising(ValueError("odd\n shape")), "tvr_bind_rope raised ValueError: odd shape"),
        (raising(SystemExit(2)), "tvr_bind_rope raised SystemExit: 2"),
        (lambda spec, device: no_run, "tvr_bind_rope returned function; it must return a BoundOp"),
        (lambda spec, device: BoundOp(run=lambda q: None), "rope: run cannot be called as run"),
    ],
)
def test_a_bind_that_goes_wrong_is_passed_over_with_its_reason(answer, reason):
    a, b = fake("a", bind={"rope": answer}), fake("b")
    table = table_of(a, b)
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["b"]}
    ((op, backend, reasons),) = table.passed_over
    assert (op, backend) == ("rope", "a")
    assert reasons[0].startswith(reason)


def test_an_interrupt_passes_through_a_bind_hook():
    table = table_of(fake("a", bind={"rope": raising(KeyboardInterrupt())}), fake("b"))
    with pytest.raises(KeyboardInterrupt):
        table.bind(spec_of("rope"))


def test_a_spec_that_is_not_declared_is_never_shown_to_the_backend():
    a = fake("a", {"attention_decode": [BOX]})
    table = table_of(a, fake("b", {"attention_decode": [Box(
        dtypes=["float32"], devices=["cpu"], fields=frozenset({"window"}))]}))  # fmt: skip
    table.bind(spec_of("attention_decode", window=64))
    assert table.passed_over == [
        PassedOver("attention_decode", "a", ["window=64 is not supported"])
    ]
    assert not a.asked


def test_each_backend_is_asked_once_for_a_spec_whatever_comes_of_it():
    a, b = fake("a", bind={"rope": raising(ValueError("no"))}), fake("b")
    table = table_of(a, b)
    first = table.bind(spec_of("rope"))
    assert table.bind(spec_of("rope")) is first
    table.explain_ops([spec_of("rope")])
    assert a.asked == b.asked == [spec_of("rope")]


def test_no_backend_is_an_error_with_the_reasons_of_each():
    a = fake("a", {"rope": [Box(dtypes=["bfloat16"], devices=["cpu"])]})
    b = fake("b", ["rope"], bind={"rope": raising(OSError("no file"))})
    c = fake("c", probe=lambda device: ["no driver"])
    config = PluginConfig(order=("triton",))
    with pytest.raises(UnsupportedSpec) as caught:
        table_of(a, b, c, config=config).bind(spec_of("rope"))
    text = str(caught.value)
    assert text.startswith("rope: no backend serves RopeSpec(dtype='float32'")
    assert "a: dtype float32 is not among bfloat16; " in text
    assert "b: tvr_bind_rope raised OSError: no file; " in text
    assert "c: no driver; triton: is not installed; " in text
    assert "\n" not in text
    assert isinstance(caught.value.__cause__, OSError)


def test_batch_invariance_is_refused_with_the_name_of_the_op():
    with pytest.raises(UnsupportedSpec, match=r"linear: .* a: is not declared batch_invariant"):
        table_of(fake("a")).bind(spec_of("linear", batch_invariant=True))


# Pins.


def test_a_pinned_backend_serves_its_op_and_no_other():
    table = table_of(fake("a"), fake("b"), config=PluginConfig(pins={"rope": "b"}))
    for op in ("rope", "argmax"):
        table.bind(spec_of(op))
    assert table.served() == {"rope": ["b"], "argmax": ["a"]}


@pytest.mark.parametrize(
    ("pinned", "reason"),
    [
        (fake("b", ["argmax"]), "does not implement rope"),
        (fake("b", bind={"rope": nothing}), "returned None"),
        (fake("b", bind={"rope": raising(OSError("no file"))}), "raised OSError: no file"),
        (fake("b", probe=lambda device: ["no driver"]), "no driver"),
    ],
)
def test_a_pinned_backend_never_falls_through(pinned, reason):
    table = table_of(fake("a"), pinned, config=PluginConfig(pins={"rope": "b"}))
    message = f"rope is pinned to b, which does not serve RopeSpec.*{reason}"
    with pytest.raises(UnsupportedSpec, match=message):
        table.bind(spec_of("rope"))


def test_an_op_pinned_to_what_is_not_installed_is_an_error():
    table = table_of(fake("a"), config=PluginConfig(pins={"rope": "triton"}))
    with pytest.raises(UnsupportedSpec, match="triton: is not installed"):
        table.bind(spec_of("rope"))


def test_an_exception_of_a_pinned_backend_is_the_cause_of_the_error():
    error = OSError("no file")
    pinned = fake("b", bind={"rope": raising(error)})
    table = table_of(pinned, config=PluginConfig(pins={"rope": "b"}))
    with pytest.raises(UnsupportedSpec) as caught:
        table.bind(spec_of("rope"))
    assert caught.value.__cause__ is error


# A backend named by the user, and strict.


def test_a_named_backend_goes_first_and_what_it_does_not_serve_is_told():
    table = table_of(fake("a"), fake("b", ["rope"]), backend="b")
    for op in ("rope", "argmax"):
        table.bind(spec_of(op))
    assert table.backend == "b"
    assert table.served() == {"rope": ["b"], "argmax": ["a"]}
    assert table.passed_over == [PassedOver("argmax", "b", ["does not implement argmax"])]


def test_a_named_backend_is_told_that_an_op_is_pinned_elsewhere():
    config = PluginConfig(pins={"rope": "a"})
    table = table_of(fake("a"), fake("b"), config=config, backend="b")
    table.bind(spec_of("rope"))
    assert table.passed_over == [PassedOver("rope", "b", ["rope is pinned to a"])]


def test_auto_is_the_configured_order():
    table = table_of(fake("a"), fake("b"), backend="auto")
    assert table.backend is None
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["a"]}


def test_naming_an_unknown_backend_lists_the_known_ones():
    message = "backend 'fsat' is not known; known: a, pycuda, torch, triton"
    with pytest.raises(BackendUnavailable, match=message):
        table_of(fake("a"), backend="fsat")


def test_strict_refuses_to_fall_through():
    table = table_of(fake("a", ["rope"]), fake("b"), strict=True)
    table.bind(spec_of("rope"))
    with pytest.raises(UnsupportedSpec, match=r"strict refuses.*a: does not implement argmax"):
        table.bind(spec_of("argmax"))


def test_strict_keeps_to_the_named_backend():
    table = table_of(fake("a"), fake("b", ["rope"]), strict=True, backend="b")
    table.bind(spec_of("rope"))
    with pytest.raises(UnsupportedSpec, match="b: does not implement argmax"):
        table.bind(spec_of("argmax"))


def test_strict_allows_a_pin():
    config = PluginConfig(pins={"rope": "b"})
    table = table_of(fake("a", ["argmax"]), fake("b"), config=config, strict=True)
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["b"]}


# Composites. In each line: what the backends have, in rank order, and who must serve.

RANKS = [
    ([["rope_kv_write"], OPS], "0"),
    ([["rope"], OPS], "0 + 1"),
    ([["kv_write"], OPS], "1 + 0"),
    ([["rope", "rope_kv_write"], OPS], "0"),
    ([["rope", "kv_write"], OPS], "0 + 0"),
    ([["argmax"], OPS], "1"),
    ([["argmax"], ["rope"], OPS], "1 + 2"),
    ([["kv_write"], ["rope"], OPS], "1 + 0"),
    ([["argmax"], ["rope_kv_write"], ["rope"], OPS], "1"),
    ([["rope"], ["rope_kv_write"], ["kv_write"]], "0 + 2"),
]


@pytest.mark.parametrize(("backends", "servers"), RANKS)
def test_a_composite_is_served_whole_only_by_one_ranked_no_lower_than_any_binder_of_a_part(
    backends, servers
):
    table = table_of(*(fake(f"b{i}", ops) for i, ops in enumerate(backends)))
    table.bind(spec_of("rope_kv_write"))
    wanted = servers.replace("0", "b0").replace("1", "b1").replace("2", "b2")
    assert table.served()["rope_kv_write"] == [wanted]


def test_a_plugin_with_only_rms_norm_serves_the_norm_of_add_rms_norm():
    table = table_of(fake("a", ["rms_norm"]), fake("b"))
    table.bind(spec_of("add_rms_norm"))
    assert table.served() == {"rms_norm": ["a"], "add_rms_norm": ["a"]}


def test_the_rank_rule_counts_only_binders_of_the_very_spec():
    """Declared for bf16 only, it is no binder of an fp32 part."""
    half = fake("a", {"rope": [Box(dtypes=["bfloat16"], devices=["cpu"])]})
    refuser = fake("b", ["rope"], bind={"rope": nothing})
    table = table_of(half, refuser, fake("c"))
    table.bind(spec_of("rope_kv_write"))
    assert table.served() == {"rope_kv_write": ["c"]}


def test_parts_of_lower_ranked_backends_are_not_even_asked():
    a, b = fake("a"), fake("b")
    table_of(a, b).bind(spec_of("rope_kv_write"))
    assert a.asked == [spec_of("rope_kv_write")]
    assert not b.asked


def test_a_pinned_part_is_honoured_by_composing():
    table = table_of(fake("a"), fake("b"), config=PluginConfig(pins={"kv_write": "b"}))
    table.bind(spec_of("rope_kv_write"))
    assert table.served()["rope_kv_write"] == ["a + b"]


def test_a_pinned_composite_is_served_whole_even_where_a_part_is_pinned():
    config = PluginConfig(pins={"kv_write": "b", "rope_kv_write": "c"})
    table = table_of(fake("a"), fake("b"), fake("c"), config=config)
    table.bind(spec_of("rope_kv_write"))
    assert table.served() == {"rope_kv_write": ["c"]}


def test_a_pinned_composite_is_not_composed():
    config = PluginConfig(pins={"rope_kv_write": "b"})
    table = table_of(fake("a"), fake("b", ["rope", "kv_write"]), config=config)
    with pytest.raises(UnsupportedSpec, match="b: does not implement rope_kv_write"):
        table.bind(spec_of("rope_kv_write"))


def test_strict_composes_from_one_backends_parts_and_refuses_anothers():
    table = table_of(fake("a", ["rope", "kv_write"]), fake("b"), strict=True)
    table.bind(spec_of("rope_kv_write"))
    assert table.served()["rope_kv_write"] == ["a + a"]
    table = table_of(fake("a", ["rope"]), fake("b"), strict=True)
    with pytest.raises(
        UnsupportedSpec, match=r"kv_write would fall through.*a: does not implement"
    ):
        table.bind(spec_of("rope_kv_write"))


def test_a_part_that_nobody_serves_is_an_error_that_names_it():
    with pytest.raises(UnsupportedSpec, match="kv_write: no backend serves"):
        table_of(fake("a", ["rope"])).bind(spec_of("rope_kv_write"))


# Plans and workspaces.


class Stateful:
    """Binds ops with a plan and a workspace, and writes down what is done with them."""

    def __init__(self, num_bytes=1000):
        self.num_bytes = num_bytes
        self.workspaces = []
        self.planned = []
        self.bounds = []

    def __call__(self, spec, device):
        def workspace_bytes(bounds):
            self.bounds.append(bounds)
            return self.num_bytes

        return BoundOp(
            run=no_run,
            plan=lambda step: self.planned.append((spec.op, step)),
            workspace_bytes=workspace_bytes,
            attach=self.workspaces.append,
        )

    def table(self, *ops):
        table = table_of(fake("a", bind=dict.fromkeys(OPS, self)))
        for op in ops:
            table.bind(spec_of(op))
        return table


def step_of(decode="decode", prefill="prefill"):
    return SimpleNamespace(step="step", decode=decode, prefill=prefill)


@pytest.mark.parametrize("num_bytes", [1, 255, 256, 1000, 0])
def test_workspaces_are_zeroed_aligned_and_of_the_size_asked_for(num_bytes):
    fakes = Stateful(num_bytes)
    table = fakes.table("rope", "argmax", "attention_decode")
    assert table.allocate(BOUNDS) == 3 * num_bytes
    assert fakes.bounds == [BOUNDS] * 3
    assert len(fakes.workspaces) == 3
    for workspace in fakes.workspaces:
        assert workspace.dtype == torch.uint8
        assert workspace.shape == (num_bytes,)
        assert workspace.data_ptr() % ALIGNMENT == 0
        assert not workspace.any()


def test_workspaces_do_not_overlap():
    fakes = Stateful(1000)
    fakes.table("rope", "argmax").allocate(BOUNDS)
    first, second = fakes.workspaces
    first.fill_(7)
    assert not second.any()


def test_workspaces_live_as_long_as_the_table():
    """A backend may keep the bare address."""
    seen = []
    fakes = Stateful()
    fakes.workspaces = SimpleNamespace(append=lambda w: seen.append(w.data_ptr()))
    table = fakes.table("rope")
    table.allocate(BOUNDS)
    assert [w.data_ptr() for w in table._workspaces] == seen


def test_workspaces_are_allocated_once():
    table = Stateful().table("rope")
    table.allocate(BOUNDS)
    with pytest.raises(ConfigError, match="allocated already"):
        table.allocate(BOUNDS)


def test_a_new_spec_after_allocation_is_an_error_and_a_known_one_is_not():
    table = Stateful().table("rope")
    table.allocate(BOUNDS)
    table.bind(spec_of("rope"))
    with pytest.raises(ConfigError, match="must be bound before the workspaces are allocated"):
        table.bind(spec_of("argmax"))


def test_planning_before_allocation_is_an_error():
    with pytest.raises(ConfigError, match="must be allocated before the first step"):
        Stateful().table("rope").plan(step_of())


@pytest.mark.parametrize("num_bytes", [-1, 1.5, None, "8"])
def test_a_workspace_size_that_is_none_is_an_error_that_names_the_backend(num_bytes):
    with pytest.raises(PluginError, match="rope of backend 'a': workspace_bytes returned"):
        Stateful(num_bytes).table("rope").allocate(BOUNDS)


@pytest.mark.parametrize("name", ["workspace_bytes", "attach"])
def test_an_exception_at_allocation_names_the_op_and_the_backend(name):
    def fail(argument):
        raise OSError("no\nroom")

    hooks = {"workspace_bytes": lambda bounds: 8, "attach": lambda workspace: None, name: fail}
    bound = BoundOp(run=no_run, **hooks)
    table = table_of(fake("a", bind={"rope": lambda spec, device: bound}))
    table.bind(spec_of("rope"))
    message = f"rope of backend 'a': {name} raised OSError: no room"
    with pytest.raises(PluginError, match=message) as caught:
        table.allocate(BOUNDS)
    assert isinstance(caught.value.__cause__, OSError)


def test_plans_run_in_binding_order_each_with_its_part_of_the_step():
    fakes = Stateful()
    table = fakes.table("rope", "attention_prefill", "attention_decode", "argmax")
    table.allocate(BOUNDS)
    table.plan(step_of())
    assert fakes.planned == [
        ("rope", "step"),
        ("attention_prefill", "prefill"),
        ("attention_decode", "decode"),
        ("argmax", "step"),
    ]


def test_a_plan_for_a_part_that_a_step_lacks_is_skipped():
    fakes = Stateful()
    table = fakes.table("attention_prefill", "attention_decode")
    table.allocate(BOUNDS)
    table.plan(step_of(prefill=None))
    table.plan(step_of(decode=None))
    assert [op for op, _ in fakes.planned] == ["attention_decode", "attention_prefill"]


def test_a_spec_bound_twice_is_planned_once():
    fakes = Stateful()
    table = fakes.table("rope", "rope")
    table.allocate(BOUNDS)
    table.plan(step_of())
    assert len(fakes.planned) == len(fakes.workspaces) == 1


def test_the_parts_of_a_composed_op_are_planned_and_get_workspaces():
    fakes = Stateful()
    table = table_of(fake("a", ["rope", "kv_write"], bind={"rope": fakes, "kv_write": fakes}))
    table.bind(spec_of("rope_kv_write"))
    assert table.allocate(BOUNDS) == 2000
    table.plan(step_of())
    assert fakes.planned == [("rope", "step"), ("kv_write", "step")]


def test_what_is_only_explained_is_not_planned_and_gets_no_workspace():
    fakes = Stateful()
    table = fakes.table("rope")
    table.explain_ops([spec_of("argmax")])
    assert table.allocate(BOUNDS) == 1000
    assert table.served() == {"rope": ["a"]}


def test_one_bound_op_with_a_workspace_for_two_specs_is_passed_over():
    """The second workspace would take the place of the first."""
    shared = Stateful()(spec_of("rope"), CPU)
    table = table_of(fake("a", bind={"rope": lambda spec, device: shared}), fake("b"))
    table.bind(spec_of("rope"))
    table.bind(spec_of("rope", dtype="bfloat16"))
    assert table.served() == {"rope": ["a", "b"]}
    assert "returned one BoundOp for two specs" in table.passed_over[0].reasons[0]


def test_a_bound_op_without_a_state_may_be_shared():
    shared = BoundOp(run=no_run)
    table = table_of(fake("a", bind={"rope": lambda spec, device: shared}))
    assert table.bind(spec_of("rope")) is table.bind(spec_of("rope", dtype="bfloat16"))


# Linear.


def test_linear_is_packed_by_its_binder():
    def bind(spec, device):
        return BoundOp(run=no_run, pack=lambda weight, bias: ("packed", weight, bias))

    bound = table_of(fake("a", bind={"linear": bind})).bind(spec_of("linear"))
    assert bound.run is no_run
    assert bound.pack(1, 2) == ("packed", 1, 2)


def test_linear_may_be_routed_by_row_count_to_two_backends():
    few = fake("a", {"linear": [Box(dtypes=["float32"], devices=["cpu"], max_rows=8)]})
    table = table_of(few, fake("b"))
    table.bind(spec_of("linear", max_rows=8))
    table.bind(spec_of("linear"))
    assert table.served() == {"linear": ["a", "b"]}
    assert [spec.max_rows for spec in few.asked] == [8]


# Flags.


def flagged(*flags):
    return [Box(dtypes=["float32"], devices=["cpu", "cuda"], flags=frozenset(flags))]


def test_the_table_knows_what_is_declared_for_each_bound_op():
    a = fake(
        "a", {"rope": flagged("cuda_graph", "deterministic"), "kv_write": flagged("cuda_graph")}
    )
    b = fake("b", {"argmax": flagged(), "rope_kv_write": flagged()})
    table = table_of(a, b)
    for op in ("rope_kv_write", "argmax"):
        table.bind(spec_of(op))
    assert table.flags(spec_of("rope")) == {"cuda_graph", "deterministic"}
    assert table.flags(spec_of("rope_kv_write")) == {"cuda_graph"}  # what all its parts have
    assert table.lacking("cuda_graph") == {"argmax": ["b"]}
    assert table.lacking("deterministic") == {"kv_write": ["a"], "argmax": ["b"]}


# Explaining.


def test_explain_tells_who_serves_and_why_each_other_does_not():
    table = table_of(
        fake("a", ["rope"]),
        fake("b", probe=lambda device: ["no driver"]),
        fake("c"),
        fake("d"),
        config=PluginConfig(order=("triton",)),
    )
    told = table.explain_ops([spec_of("argmax"), spec_of("rope_kv_write")])
    assert json.loads(json.dumps(told)) == told
    argmax, composed = told
    assert argmax["served_by"] == "c"
    assert argmax["backends"] == [
        {"name": "a", "status": "passed over", "reasons": ["does not implement argmax"]},
        {"name": "b", "status": "passed over", "reasons": ["no driver"]},
        {"name": "c", "status": "serves", "reasons": []},
        {"name": "d", "status": "not asked", "reasons": []},
        {"name": "triton", "status": "passed over", "reasons": ["is not installed"]},
    ]
    assert composed["served_by"] == "a + c"
    assert composed["backends"][0]["status"] == "serves a part"
    assert [part["served_by"] for part in composed["parts"]] == ["a", "c"]


def test_explain_tells_why_a_backend_that_has_the_whole_does_not_serve_it():
    table = table_of(fake("a", ["rope"]), fake("b", ["rope_kv_write"]), fake("c"))
    (told,) = table.explain_ops([spec_of("rope_kv_write")])
    assert told["served_by"] == "a + c"
    why = "rope_kv_write is composed of its parts, since a, which ranks higher, serves rope"
    assert [(row["status"], row["reasons"]) for row in told["backends"]] == [
        ("serves a part", ["does not implement rope_kv_write"]),
        ("passed over", [why]),
        ("serves a part", [why]),
    ]


def test_a_named_backend_is_told_that_a_pinned_part_keeps_it_from_serving_the_whole():
    config = PluginConfig(pins={"rope": "b"})
    table = table_of(fake("a"), fake("b"), config=config, backend="a")
    table.bind(spec_of("rope_kv_write"))
    why = "rope_kv_write is composed of its parts, since rope is pinned to b"
    assert PassedOver("rope_kv_write", "a", [why]) in table.passed_over


def test_a_backend_that_serves_all_parts_is_not_said_to_lack_the_whole():
    table = table_of(fake("a", ["rms_norm"]), fake("b"), backend="a")
    table.bind(spec_of("add_rms_norm"))
    assert table.served()["add_rms_norm"] == ["a"]
    assert not [passed for passed in table.passed_over if passed.backend == "a"]


def test_explain_tells_what_nobody_serves():
    (told,) = table_of(fake("a", ["rope"])).explain_ops([spec_of("argmax")])
    assert told["served_by"] is None
    assert "no backend serves" in told["error"]


def test_explain_shows_a_pinned_backend_that_is_not_listed(tmp_path):
    manager = manager_of(fake("a"), config=PluginConfig(pins={"rope": "triton"}))
    (told,) = OpTable(manager, CPU).explain_ops([spec_of("rope")])
    assert told["backends"] == [
        {"name": "a", "status": "passed over", "reasons": ["rope is pinned to triton"]},
        {"name": "triton", "status": "passed over", "reasons": ["is not installed"]},
    ]


# Streams.


class FakeStream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __repr__(self):
        return self.name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other}")


@pytest.fixture
def log(monkeypatch):
    """What is done with fake CUDA streams; the current one is called "engine"."""
    log = []

    class Using:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            log.append(f"enter {self.stream}")

        def __exit__(self, *exc):
            log.append(f"leave {self.stream}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("engine", log))
    monkeypatch.setattr(torch.cuda, "stream", Using)
    return log


def streamed(name, log, ops=OPS):
    stream = FakeStream(f"{name}'s", log)

    def bind(spec, device):
        return BoundOp(
            run=lambda *args, **kwargs: log.append(f"{name} runs {spec.op} {args} {kwargs}"),
            plan=lambda step: log.append(f"{name} plans"),
            pack=(lambda weight, bias: "packed") if spec.op == "linear" else None,
        )

    return fake(name, ops, bind=dict.fromkeys(ops, bind), stream=lambda device: stream)


def test_the_best_ranked_backend_with_a_stream_owns_the_engines(log):
    table = table_of(fake("a"), streamed("b", log), streamed("c", log), device=GPU)
    assert table.stream.name == "b's"
    assert table_of(fake("a"), device=GPU).stream is None


def test_the_owners_ops_and_those_without_a_stream_are_called_bare(log):
    table = table_of(fake("a", ["rope"]), streamed("b", log), device=GPU)
    assert table.bind(spec_of("rope")).run is no_run
    table.bind(spec_of("argmax")).run("x", out="y")
    assert log == ["b runs argmax ('x',) {'out': 'y'}"]


def test_ops_of_another_backend_with_a_stream_fork_from_the_callers_and_join_it(log):
    table = table_of(streamed("a", log, ["rope"]), streamed("b", log), device=GPU)
    table.bind(spec_of("linear")).run("x", out="y")
    assert log == [
        "b's waits for engine",
        "enter b's",
        "b runs linear ('x',) {'out': 'y'}",
        "leave b's",
        "engine waits for b's",
    ]
    log.clear()
    table.allocate(BOUNDS)
    table.plan(step_of())
    assert log == [
        "b's waits for engine", "enter b's", "b plans", "leave b's", "engine waits for b's",
    ]  # fmt: skip
    log.clear()
    assert table.bind(spec_of("linear")).pack("weight", None) == "packed"
    assert log[0] == "b's waits for engine"


def test_a_stream_that_two_backends_share_needs_no_fork(log):
    a, b = streamed("a", log, ["rope"]), streamed("b", log)
    b.tvr_stream = a.tvr_stream
    table_of(a, b, device=GPU).bind(spec_of("argmax")).run("x")
    assert log == ["b runs argmax ('x',) {}"]


def test_a_stream_is_asked_for_once_and_never_on_the_cpu(log):
    asked = []
    plugin = fake("a", stream=lambda device: asked.append(device))
    config = PluginConfig(pins={"rope": "a"})
    table = table_of(plugin, device=GPU, config=config)
    table.bind(spec_of("rope"))
    table.bind(spec_of("argmax"))
    assert asked == [GPU]
    assert table_of(plugin).stream is None
    assert asked == [GPU]


def no_context(device):
    raise OSError("no context")


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (no_context, "tvr_stream raised OSError: no context"),
        (lambda device: 7, "tvr_stream returned int; it must return a torch stream or None"),
    ],
)
def test_a_backend_whose_stream_goes_wrong_is_passed_over_and_cannot_be_named(stream, reason):
    table = table_of(fake("a", stream=stream), fake("b"), device=GPU)
    table.bind(spec_of("rope"))
    assert table.served() == {"rope": ["b"]}
    assert table.passed_over == [PassedOver("rope", "a", [reason])]
    with pytest.raises(BackendUnavailable, match=f"'a' cannot be used: {reason}"):
        table_of(fake("a", stream=stream), fake("b"), device=GPU, backend="a")
