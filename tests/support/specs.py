"""One small spec of every op."""

from __future__ import annotations

from tvr.contract import SPECS, OpSpec

_FACTS = {
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "block_size": 16,
    "in_features": 64,
    "out_features": 32,
    "num_top": 5,
}


def spec_of(op: str, **changes: object) -> OpSpec:
    """Return a spec of `op` with every field neutral but for `changes`."""
    cls = SPECS[op]
    needed = {k: v for k, v in _FACTS.items() if k in cls.__dataclass_fields__}
    return cls(**{**needed, **changes})
