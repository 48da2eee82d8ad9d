"""Typed look-ups in a JSON object; errors name the file, the key and what was found."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tvr.errors import ConfigError

# Sizes are int32 in kernels; nothing real comes near.
_LARGEST = 2**31 - 1


class Fields:
    """The fields of one JSON object. A null field counts as absent.

    Args:
        data: the object.
        source: what to call it in messages, such as "config.json".
    """

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self._data = data
        self._source = source

    def get(self, key: str) -> Any:  # noqa: ANN401
        """Return the raw value, None where absent."""
        return self._data.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 1 to 2^31 - 1; raise ConfigError for anything else."""
        value = self._required(key, default)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self._wrong(key, value, f"a whole number from 1 to {_LARGEST}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0; raise ConfigError for anything else."""
        value = self._required(key, default)
        # Integers in JSON have no bound; one past the largest float is as good as infinite.
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a boolean, False where absent; raise ConfigError for anything else."""
        value = self._required(key, False)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> list[int]:
        """Return an id or a list of ids as a list, empty where absent."""
        value = self.get(key)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int for i in ids):
            raise self._wrong(key, value, "a token id or a list of them")
        return ids

    def _required(self, key: str, default: Any) -> Any:  # noqa: ANN401
        value = self._data.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._source}: {key} is missing; it has no default")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self._source}: {key} is {value!r}; it must be {wanted}")
