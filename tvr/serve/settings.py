"""How a server was asked to be."""

from __future__ import annotations

from dataclasses import dataclass

from tvr.errors import ConfigError

_MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of one server.

    Attributes:
        model_names: the names that requests may ask for; answers carry the first.
        api_keys: any of them opens every route; none: all are open.
        max_waiting: sequences that may wait, beside the engine's `max_num_seqs` that run.
        max_body_bytes: longest body of a request.
        drain_s: seconds that requests may take to end once the server is asked to.
        text_threads: threads that tokenise what is to be answered.

    Raises:
        ConfigError: a value out of its range.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 1024
    max_body_bytes: int = 8 << 20
    drain_s: float = 30.0
    text_threads: int = 4

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("the served model has an empty name; give --served-model-name one")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    "an --api-key is empty or has spaces or other than printable ASCII characters;"
                    " a header could not carry it"
                )
        for name, value, least, most in (
            ("max_waiting", self.max_waiting, 0, _MILLION),
            ("max_body_bytes", self.max_body_bytes, 1024, 1024 * _MILLION),
            ("drain_s", self.drain_s, 0, _MILLION),
            ("text_threads", self.text_threads, 1, 256),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from {least} to {most}")
