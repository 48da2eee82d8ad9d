"""Hypothesis strategies for cases: they draw structure and a seed, never numbers of a tensor.

Shrinking then ends at few rows, small heads and neutral fields, in a line that can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tvr.conformance.case import Case
from tvr.contract import (
    DTYPES,
    SPECS,
    ArgmaxSpec,
    AttentionDecodeSpec,
    AttentionSpec,
    BackendInfo,
    Box,
    DeviceFacts,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    RmsNormSpec,
    RopeSpec,
    SiluMulSpec,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
GROUP_SIZES = tuple(range(1, 17))
_MAX_KV_HEADS = 4


class Reach(NamedTuple):
    """How far the drawn cases of a level go.

    Attributes:
        rows: tokens, for all ops but attention.
        width: columns of a norm, an activation or a product.
        batch: sequences.
        q_len, kv_len: tokens of one sequence.
        heads: query heads in all.
    """

    rows: int
    width: int
    batch: int
    q_len: int
    kv_len: int
    heads: int


REACH = {
    "smoke": Reach(rows=9, width=600, batch=4, q_len=20, kv_len=130, heads=16),
    "quick": Reach(rows=70, width=3000, batch=8, q_len=70, kv_len=600, heads=32),
    "full": Reach(rows=300, width=9000, batch=32, q_len=300, kv_len=4100, heads=64),
}


def cases(op: str, info: BackendInfo, device: DeviceFacts, level: str) -> st.SearchStrategy[Case]:
    """Return cases of `op` inside the boxes that `info` declares for `device`.

    Without such a box, and to judge a declaration, they are drawn from the whole contract.
    """
    boxes = [box for box in info.ops.get(op, ()) if device.type in box.devices]
    return _case(op, boxes or [_everything(op)], REACH[level])


def any_cases(op: str, level: str) -> st.SearchStrategy[Case]:
    """Return cases of `op` from the whole contract, declared or not."""
    return _case(op, [_everything(op)], REACH[level])


def _everything(op: str) -> Box:
    return Box(dtypes=DTYPES, fields=frozenset(SPECS[op].__dataclass_fields__))


@st.composite
def _case(draw: Draw, op: str, boxes: Sequence[Box], reach: Reach) -> Case:
    box = draw(st.sampled_from(boxes))
    spec = _spec(draw, op, box, reach)
    seed = draw(st.integers(0, 999))
    if isinstance(spec, AttentionSpec):
        q_lens, kv_lens = _lens(draw, spec, reach)
        return Case(spec=spec, q_lens=q_lens, kv_lens=kv_lens, seed=seed)
    most = reach.rows
    if isinstance(spec, LinearSpec) and spec.max_rows is not None:
        most = min(most, spec.max_rows)
    return Case(spec=spec, num_tokens=draw(st.integers(1, most)), seed=seed)


def _spec(draw: Draw, op: str, box: Box, reach: Reach) -> OpSpec:
    facts: dict[str, Any] = {"dtype": draw(st.sampled_from(box.dtypes))}
    spec_type = SPECS[op]
    width = st.integers(1, reach.width)
    if issubclass(spec_type, RmsNormSpec):
        # Rows of 16 bytes, as all of core's are.
        facts["hidden_size"] = 8 * draw(st.integers(1, reach.width // 8))
    elif spec_type is SiluMulSpec:
        facts["intermediate_size"] = 8 * draw(st.integers(1, reach.width // 8))
    elif spec_type is ArgmaxSpec:
        facts["vocab_size"] = draw(st.integers(2, 4 * reach.width))
    elif spec_type is LinearSpec:
        facts |= {"in_features": 8 * draw(st.integers(1, reach.width // 8))}
        facts |= {"out_features": draw(width), "max_rows": box.max_rows}
        facts["weight_format"] = draw(st.sampled_from(box.weight_formats or ("dense",)))
    else:
        facts |= _heads(draw, spec_type, box, reach)
    return spec_type(**facts | _fields(draw, spec_type, box, facts))


def _heads(draw: Draw, spec_type: type[OpSpec], box: Box, reach: Reach) -> dict[str, int]:
    facts = {"head_dim": draw(st.sampled_from(box.head_dims or HEAD_DIMS))}
    group_sizes = box.group_sizes or GROUP_SIZES
    kv_heads = draw(st.integers(1, _MAX_KV_HEADS))
    if not issubclass(spec_type, KvWriteSpec):
        fitting = [g for g in group_sizes if g * kv_heads <= reach.heads] or [min(group_sizes)]
        facts["num_heads"] = kv_heads * draw(st.sampled_from(fitting))
    facts["num_kv_heads"] = kv_heads
    if spec_type is not RopeSpec:
        facts["block_size"] = draw(st.sampled_from(box.block_sizes or BLOCK_SIZES))
    return facts


def _fields(draw: Draw, spec_type: type[OpSpec], box: Box, facts: dict[str, Any]) -> dict[str, Any]:
    """Draw the fields that `box` honours away from their neutral value; half of them stay there."""
    half_rotary = max(2, facts.get("head_dim", 0) // 2)
    values: dict[str, Sequence[Any]] = {
        "window": (None, 1, 5, 16, 40),
        "softcap": (None, 2.0, 30.0),
        "causal": (True, False),
        "return_lse": (False, True),
        "max_splits": (None, 1, 2, 7),
        "bias": (False, True),
        "rotary_dim": (None, half_rotary),
    }
    if facts["dtype"] == "float32":
        values["kv_dtype"] = (None, "float16", "bfloat16")
    names = sorted(box.fields & values.keys() & spec_type.__dataclass_fields__.keys())
    return {name: draw(st.sampled_from(values[name])) for name in names}


def _lens(draw: Draw, spec: AttentionSpec, reach: Reach) -> tuple[tuple[int, ...], tuple[int, ...]]:
    edges = range(spec.block_size, reach.kv_len, spec.block_size)
    around = sorted({edge + step for edge in edges for step in (-1, 0, 1)})
    kv_len = st.integers(0, reach.kv_len)
    if around:
        kv_len |= st.sampled_from(around)
    q_len = st.integers(0, reach.q_len)
    if isinstance(spec, AttentionDecodeSpec):
        q_len = st.just(spec.max_q_len)
    sequences = st.lists(st.tuples(q_len, kv_len), min_size=1, max_size=reach.batch)
    pairs = draw(sequences.filter(lambda pairs: any(q for q, _ in pairs)))
    return tuple(q for q, _ in pairs), tuple(kv for _, kv in pairs)
