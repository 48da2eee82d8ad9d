"""Rotary settings of `config.json`, in every form checkpoints have them. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvr.core.config_fields import Fields
from tvr.errors import ConfigError

DEFAULT_THETA = 10000.0

_KINDS = ("default", "linear", "llama3")
# Keys that some writers put beside the rotary object and others into it.
_OUTER_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies of a checkpoint are stretched for longer contexts.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides those of long
            wavelength, keeps those of short wavelength and blends in between; "per_pair" divides
            each by `factor` and by its own of the `divisors` (only GGUF files have it).
        factor: the divisor.
        low_freq_factor, high_freq_factor: llama3: a wavelength is long above
            `original_max_position_embeddings / low_freq_factor` and short below
            `original_max_position_embeddings / high_freq_factor`.
        original_max_position_embeddings: llama3: context length before stretching, tokens.
        divisors: per_pair: one for each of the head_dim / 2 channel pairs.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    divisors: tuple[float, ...] = ()


def parse_rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and scaling that `config.json` states.

    Reads the old form (`rope_theta` beside a `rope_scaling` object with `type` or `rope_type`)
    and the new one (all of it in `rope_parameters`).

    Raises:
        ConfigError: a kind of scaling that is not supported, a missing key, or two places that
            contradict each other.
    """
    merged: dict[str, Any] = {}
    outer = {key: data[key] for key in _OUTER_KEYS if data.get(key) is not None}
    for source in ("rope_scaling", "rope_parameters"):
        given = data.get(source) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: {source} is {given!r}; it must be an object or null")
        _merge(merged, given)
    _merge(merged, outer)

    kinds = {str(merged[key]) for key in ("rope_type", "type") if key in merged}
    if len(kinds) > 1:
        raise ConfigError(
            f"config.json: the rotary settings have type {merged['type']!r} and rope_type "
            f"{merged['rope_type']!r}; remove one"
        )
    if not kinds and "factor" in merged:
        raise ConfigError(
            f"config.json: rotary settings with a factor lack rope_type; use {', '.join(_KINDS)}"
        )
    kind = kinds.pop() if kinds else "default"
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(_KINDS)}"
        )
    if any(isinstance(value, dict) for value in merged.values()):
        raise ConfigError("config.json: rotary settings per layer type are not supported")
    fields = Fields(merged, "config.json: rotary settings")
    if fields.positive("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor {merged['partial_rotary_factor']} is not "
            "supported; all of head_dim is rotated (1.0)"
        )
    return fields.positive("rope_theta", DEFAULT_THETA), _scaling(kind, fields)


def _scaling(kind: str, fields: Fields) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=fields.positive("factor"))
    scaling = RopeScaling(
        kind=kind,
        factor=fields.positive("factor"),
        low_freq_factor=fields.positive("low_freq_factor"),
        high_freq_factor=fields.positive("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ConfigError(
            f"config.json: high_freq_factor {scaling.high_freq_factor} must be above "
            f"low_freq_factor {scaling.low_freq_factor}"
        )
    return scaling


def _merge(merged: dict[str, Any], given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if value is None:
            continue
        if merged.setdefault(key, value) != value:
            raise ConfigError(
                f"config.json: {key} is given twice for rotary embedding, as {merged[key]!r} and "
                f"as {value!r}; remove one"
            )
