"""Composites that core takes whole or not at all: when one backend serves them by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.fakes import fake, table_of
from support.specs import spec_of
from tvr.contract import Box
from tvr.core.plugins import PluginConfig
from tvr.errors import UnsupportedSpec

FUSED = spec_of("fused_linear", rms_norm=True, silu_mul=True)
ADD_NORM = spec_of("add_rms_norm")
PARTS = ["rms_norm", "linear", "silu_mul", "add_rms_norm"]
FIELDS = frozenset({"rms_norm", "silu_mul", "add"})


def product():
    box = Box(dtypes=["float32"], devices=["cpu"], fields=FIELDS)
    return fake("product", {"fused_linear": [box]})


def whole(*plugins, **pins):
    table = table_of(*plugins, config=PluginConfig(pins=pins))
    return table.serves_whole(FUSED, instead_of=ADD_NORM)


def test_a_composite_is_whole_where_its_server_outranks_those_of_its_parts():
    assert whole(product(), fake("parts", PARTS))
    assert not whole(fake("parts", PARTS), product())
    assert not whole(fake("parts", PARTS))


@pytest.mark.parametrize("op", PARTS)
def test_any_part_of_a_better_ranked_backend_keeps_a_composite_from_being_whole(op):
    """So does the op that it takes the place of, though that is no part of it."""
    assert not whole(fake("first", [op]), product(), fake("parts", PARTS))
    assert not whole(product(), fake("parts", PARTS), **{op: "parts"})


def captured(name, ops):
    """A fake backend whose ops can all be in CUDA graphs."""
    box = Box(dtypes=["float32"], devices=["cpu"], flags=frozenset({"cuda_graph"}))
    fused = replace(box, fields=FIELDS)
    return fake(name, {op: [fused if op == "fused_linear" else box] for op in ops})


def in_graphs(*plugins, **pins):
    return table_of(*plugins, config=PluginConfig(pins=pins), graphs=True)


def test_a_whole_that_no_graph_can_have_gives_way_to_parts_that_one_can():
    parts = captured("parts", PARTS)
    assert not in_graphs(product(), parts).serves_whole(FUSED, instead_of=ADD_NORM)
    assert whole(product(), parts)  # nothing is to be captured here
    fast = captured("fast", ["fused_linear"])
    assert in_graphs(fast, parts).serves_whole(FUSED, instead_of=ADD_NORM)


@pytest.mark.parametrize("op", ["rms_norm", "linear", "silu_mul"])
def test_it_gives_way_to_no_part_that_is_no_better(op):
    others = captured("others", [part for part in PARTS if part != op])
    table = in_graphs(product(), others, fake("eager", [op]))
    assert table.serves_whole(FUSED, instead_of=ADD_NORM)
    assert table.left_out == []


def test_behind_it_another_whole_may_serve():
    table = in_graphs(product(), captured("all", [*PARTS, "fused_linear"]))
    assert table.serves_whole(FUSED, instead_of=ADD_NORM)
    table.bind(FUSED)
    assert table.served()["fused_linear"] == ["all"]


def test_a_whole_that_is_pinned_gives_way_to_nothing():
    parts = captured("parts", PARTS)
    table = in_graphs(product(), parts, fused_linear="product")
    assert table.serves_whole(FUSED, instead_of=ADD_NORM)


def test_what_gives_way_is_told_with_the_reason():
    table = in_graphs(product(), captured("parts", PARTS))
    (explained,) = table.explain_ops([FUSED])
    assert explained["served_by"] == "parts + parts + parts"
    mine = explained["backends"][0]
    assert (mine["name"], mine["status"]) == ("product", "passed over")
    (passed,) = table.left_out
    assert passed == ("fused_linear", "product", mine["reasons"])
    assert "it is not declared cuda_graph" in mine["reasons"][0]
    assert passed in table.passed_over  # what who names it is told


def test_ops_of_every_step_are_whole_all_the_same():
    """Whoever ranks a backend of them wants them called; `--stats` says what that costs."""
    parts = captured("parts", ["rms_norm"])
    table = in_graphs(fake("norm", ["add_rms_norm"]), parts)
    table.bind(ADD_NORM)
    assert table.served()["add_rms_norm"] == ["norm"]


def test_to_ask_for_a_whole_binds_nothing():
    table = table_of(product(), fake("parts", PARTS))
    assert table.serves_whole(FUSED, instead_of=ADD_NORM)
    assert table.served() == {}


def test_where_nobody_serves_a_composite_or_its_parts_it_is_not_whole():
    assert not whole(fake("other", ["rope"]))
    assert not whole(product())  # nor where the op that it would take the place of is nobody's


def test_a_composite_that_is_pinned_to_one_that_lacks_it_is_refused():
    with pytest.raises(UnsupportedSpec, match="fused_linear is pinned to parts"):
        whole(fake("parts", PARTS), fused_linear="parts")
