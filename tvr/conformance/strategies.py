"""Hypothesis strategies for cases: they draw structure and a seed, never numbers of a tensor.

Shrinking then ends at few rows, small heads and neutral fields, in a line that can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from hypothesis import reject
from hypothesis import strategies as st

from tvr.conformance.case import Case
from tvr.contract import (
    DTYPES,
    MAX_NUM_TOP,
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
    PrepareStepSpec,
    RmsNormSpec,
    RopeSpec,
    SampleSpec,
    SiluMulSpec,
    TopLogprobsSpec,
)
from tvr.contract.capability import FLAGS
from tvr.errors import ConfigError

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
    "full": Reach(rows=300, width=6000, batch=16, q_len=150, kv_len=1100, heads=64),
}


def cases(op: str, info: BackendInfo, device: DeviceFacts, level: str) -> st.SearchStrategy[Case]:
    """Return cases of `op` inside the boxes that `info` declares for `device`.

    Without such a box, and to judge a declaration, they are drawn from the whole contract.
    """
    return _case(op, boxes_on(device, info, op) or [_everything(op)], REACH[level])


def boxes_on(device: DeviceFacts, info: BackendInfo, op: str) -> list[Box]:
    """Return the boxes that `info` declares for `op` on this device."""
    return [
        box
        for box in info.ops.get(op, ())
        if device.type in box.devices and (device.sm or 0) >= (box.min_sm or 0)
    ]


def any_cases(op: str, level: str) -> st.SearchStrategy[Case]:
    """Return cases of `op` from the whole contract, declared or not."""
    return _case(op, [_everything(op)], REACH[level])


def _everything(op: str) -> Box:
    return Box(dtypes=DTYPES, fields=frozenset(SPECS[op].__dataclass_fields__), flags=FLAGS)


@st.composite
def _case(draw: Draw, op: str, boxes: Sequence[Box], reach: Reach) -> Case:
    box = draw(st.sampled_from(boxes))
    try:
        spec = _spec(draw, op, box, reach)
    except ConfigError:  # a box may list what no spec can have, such as blocks of 24
        reject()
    seed = draw(_whole(0, 999))
    if isinstance(spec, AttentionSpec):
        q_lens, kv_lens = _lens(draw, spec, reach)
        return Case(spec=spec, q_lens=q_lens, kv_lens=kv_lens, seed=seed)
    most = reach.rows
    if isinstance(spec, LinearSpec) and spec.max_rows is not None:
        most = min(most, spec.max_rows)
    return Case(spec=spec, num_tokens=draw(_whole(1, most)), seed=seed)


def _spec(draw: Draw, op: str, box: Box, reach: Reach) -> OpSpec:
    facts: dict[str, Any] = {"dtype": draw(st.sampled_from(box.dtypes))}
    spec_type = SPECS[op]
    width = _whole(1, reach.width)
    eights = _whole(1, reach.width // 8).map(lambda n: 8 * n)
    if issubclass(spec_type, RmsNormSpec):
        # Rows of 16 bytes, as all of core's are.
        facts["hidden_size"] = draw(eights)
    elif spec_type is SiluMulSpec:
        facts["intermediate_size"] = draw(eights)
    elif spec_type is ArgmaxSpec:
        facts["vocab_size"] = draw(_whole(2, 4 * reach.width))
    elif spec_type is SampleSpec:
        facts["vocab_size"] = draw(_whole(2, reach.width))
    elif spec_type is TopLogprobsSpec:
        vocab = facts["vocab_size"] = draw(_whole(2, reach.width))
        facts["num_top"] = draw(_whole(1, min(vocab, MAX_NUM_TOP)))
    elif spec_type is PrepareStepSpec:
        facts["block_size"] = draw(st.sampled_from(box.block_sizes or BLOCK_SIZES))
    elif issubclass(spec_type, LinearSpec):
        facts |= {"in_features": draw(eights)}
        facts |= {"out_features": draw(width), "max_rows": box.max_rows}
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
    """Draw a value for at most two of the fields that `box` honours; the others stay neutral."""
    half_rotary = max(2, facts.get("head_dim", 0) // 4 * 2)  # even, whatever the head
    values: dict[str, Sequence[Any]] = {
        "window": (None, 1, 5, 16, 40),
        "softcap": (None, 2.0, 30.0),
        "causal": (True, False),
        "return_lse": (False, True),
        "max_splits": (None, 1, 2, 7),
        "bias": (False, True),
        "rms_norm": (False, True),
        "silu_mul": (False, True),
        "add": (False, True),
        "rotary_dim": (None, half_rotary),
        "batch_invariant": (False, True),
    }
    if facts["dtype"] == "float32":
        values["kv_dtype"] = (None, "float16", "bfloat16")
    else:
        values["out_dtype"] = (None, "float32")
    names = sorted({*box.fields, *box.flags} & values.keys() & {f.name for f in fields(spec_type)})
    if not names:
        return {}
    chosen = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    return {name: draw(st.sampled_from(values[name])) for name in sorted(chosen)}


def _lens(draw: Draw, spec: AttentionSpec, reach: Reach) -> tuple[tuple[int, ...], tuple[int, ...]]:
    edges = range(spec.block_size, reach.kv_len, spec.block_size)
    around = sorted({edge + step for edge in edges for step in (-1, 0, 1)})
    kv_len = _whole(0, reach.kv_len)
    if around:
        kv_len |= _whole(0, len(around) - 1).map(around.__getitem__)
    q_len = _whole(0, reach.q_len)
    if isinstance(spec, AttentionDecodeSpec):
        q_len = st.just(spec.max_q_len)
    sequences = st.lists(st.tuples(q_len, kv_len), min_size=1, max_size=reach.batch)
    pairs = draw(sequences.filter(lambda pairs: any(q for q, _ in pairs)))
    return tuple(q for q, _ in pairs), tuple(kv for _, kv in pairs)


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    """Return whole numbers from `low` to `high`.

    At times hypothesis draws a number that it has read in a loaded module, so what a seed draws
    would change with the backend's source. Those below 100 it makes up: hence two digits a time.
    """
    span = high - low
    if span < 100:
        return st.integers(0, span).map(lambda n: low + n)
    digits = st.tuples(_whole(0, span // 100), st.integers(0, 99))
    return digits.map(lambda pair: low + min(span, 100 * pair[0] + pair[1]))
