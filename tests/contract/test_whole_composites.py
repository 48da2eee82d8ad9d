"""Composites that core takes whole or not at all: when one backend serves them by itself."""

from __future__ import annotations

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
