"""Stop strings: found across tokens, without holding back more text than needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvr.errors import RequestError

if TYPE_CHECKING:
    from tvr.core.tokenizer import Tokenizer


def check_stops(stops: str | Sequence[str] | None) -> list[str]:
    """Return `stops` (None, one string or several) as a list.

    Raises:
        RequestError: not strings, or an empty one, which would end every answer at once.
    """
    if stops is None:
        return []
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise RequestError(f"stop is {stops!r}; it must be a string or a list of strings")
    if "" in stops:
        raise RequestError("stop has an empty string, which matches everywhere; leave it out")
    return list(stops)


def resolve_stops(
    tokenizer: Tokenizer,
    stops: str | Sequence[str] | None,
    *,
    skip_special_tokens: bool = True,
) -> tuple[list[str], dict[int, str]]:
    """Return what to look for in the text and which token ids stand for a stop string.

    With `skip_special_tokens` the text of a special token never reaches the output, so a stop
    string that *is* a special token's text (vllm-project/vllm#792) can only be met as an id. It
    stays among the strings too: a model may also spell it with ordinary tokens.

    Returns:
        The stop strings, and for each id to stop at the string that asked for it.

    Raises:
        RequestError: see `check_stops`.
    """
    strings = check_stops(stops)
    ids: dict[int, str] = {}
    if skip_special_tokens:
        for text in strings:
            token_id = tokenizer.special_token_id(text)
            if token_id is not None:
                ids[token_id] = text
    return strings, ids


class StopMatcher:
    """Watches one answer's text for stop strings.

    The stop string that is complete first wins; of those complete at the same character, the one
    that began first. Both do not depend on how the text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Prepare to look for `stops`.

        Args:
            stops: the strings; none: everything passes through.
            include_stop_str_in_output: whether the stop string itself is output.

        Raises:
            RequestError: see `check_stops`.
        """
        self._stops = check_stops(stops)
        self._include = include_stop_str_in_output
        self._held = ""
        # By last character: the (length, stop) of every proper prefix of a stop, shortest first.
        # Most text ends in a character that ends no prefix, and is let through at once.
        self._prefixes: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for stop in self._stops:
            for length in range(1, len(stop)):
                self._prefixes[stop[length - 1]].append((length, stop))
        for prefixes in self._prefixes.values():
            prefixes.sort()

    def push(self, text: str) -> tuple[str, str | None]:
        """Take new text; return the text to output now, and the stop string met, if any.

        What follows a stop string is dropped. The caller pushes no more once one is met.
        """
        if not self._stops or not text:
            return text, None
        buffer = self._held + text
        met: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                met = candidate if met is None else min(met, candidate)
        if met is not None:
            end, start, stop = met
            self._held = ""
            return buffer[: end if self._include else start], stop
        held = 0
        for length, stop in self._prefixes.get(buffer[-1], ()):
            if length > len(buffer):
                break
            if stop.startswith(buffer[-length:]):
                held = length
        keep = len(buffer) - held
        self._held = buffer[keep:]
        return buffer[:keep], None

    def flush(self) -> str:
        """Return the text held back; the answer ends here, so no stop string can come of it."""
        held, self._held = self._held, ""
        return held
