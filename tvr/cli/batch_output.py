"""The output of a batch: a result a line, in the order of the input, resumed where it ended."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.core.outputs import RequestOutput

Record = dict[str, Any]

#: How each record begins, so that half of one is known as ours.
_START = b'{"line": '

#: What reading a line raises that holds something else.
_NO_RECORD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Results:
    """Where results go: a file, or stdout.

    Attributes:
        num_done: results that an earlier run has left.
        num_failed: results with an error, those of earlier runs too.
    """

    def __init__(
        self, path: Path | None, keys: Sequence[tuple[int, str]], *, as_json: bool
    ) -> None:
        """Look at what is there already; nothing is written yet.

        Args:
            path: the file; None or "-": stdout.
            keys: number and hash of each input line.
            as_json: write JSON, not text.

        Raises:
            ConfigError: the file holds something else than the first results for `keys`.
        """
        self._path = None if path is None or str(path) == "-" else path
        self._as_json = as_json
        self.num_done = self.num_failed = 0
        self._size = 0
        if self._path is None:
            if sys.stdout is None:
                raise ConfigError("stdout is closed; name an --output")
        elif self._path.exists() and self._path.is_file():
            self._look_at(self._path, keys)

    def _look_at(self, path: Path, keys: Sequence[tuple[int, str]]) -> None:
        data = path.read_bytes()
        if data and not self._as_json:
            raise ConfigError(
                f"--output {path} is there already; remove it, or use --json, whose output is "
                "resumed"
            )
        *lines, rest = data.split(b"\n")
        if not (rest.startswith(_START) or _START.startswith(rest)):
            raise ConfigError(f"--output {path} is no output of tvr run --json; name another file")
        for index, line in enumerate(lines):
            try:
                record = json.loads(line)
                found = (record["line"], record["hash"])
                failed = has_failed(record)
            except _NO_RECORD as error:
                raise ConfigError(
                    f"--output {path}: line {index + 1} is no result of tvr run --json; name "
                    "another file"
                ) from error
            if index >= len(keys) or found != tuple(keys[index]):
                raise _of_another_input(path, index)
            self.num_failed += failed
        if rest and len(lines) >= len(keys):
            raise _of_another_input(path, len(lines))
        self.num_done, self._size = len(lines), len(data) - len(rest)

    def __enter__(self) -> Results:
        """Open the output; half a result at its end, of a run that was killed, is cut off."""
        if self._path is None:
            self._file: BinaryIO = sys.stdout.buffer
            return self
        try:
            if self._path.is_file():
                self._file = self._path.open("r+b")
                self._file.truncate(self._size)
                self._file.seek(self._size)
            else:
                self._file = self._path.open("wb")
        except OSError as error:
            raise ConfigError(
                f"--output {self._path} cannot be written: {error.strerror}"
            ) from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._path is not None:
            self._file.close()

    def write(self, record: Record) -> None:
        """Write one result; it is whole in the file when this returns."""
        self.num_failed += has_failed(record)
        if self._as_json:
            text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        else:
            outputs = record.get("outputs") or [{"text": ""}]
            text = "".join(_one_line(output["text"]) + "\n" for output in outputs)
        self._file.write(text.encode())
        self._file.flush()


def _of_another_input(path: Path, index: int) -> ConfigError:
    return ConfigError(
        f"--output {path}: line {index + 1} is the result of another input or of other options; "
        "name another file, or remove it to begin anew"
    )


def has_failed(record: Record) -> bool:
    """Return whether a result is an error, or holds an answer that ended with one."""
    return error_of(record) is not None


def error_of(record: Record) -> str | None:
    """Return what went wrong with a line; None: nothing."""
    if "error" in record:
        return str(record["error"])
    return next((o["error"] for o in record["outputs"] if o.get("error")), None)


def result_record(output: RequestOutput) -> Record:
    """Return a finished output as JSON data: the answers and the tokens used."""
    answers = []
    for completion in output.outputs:
        fields = dataclasses.asdict(completion)
        always = {"index", "text", "token_ids", "finish_reason"}
        answers.append({k: _plain(v) for k, v in fields.items() if k in always or v is not None})
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "completion_tokens": sum(len(o.token_ids) for o in output.outputs),
    }
    record: Record = {"outputs": answers, "usage": usage}
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _plain(output.prompt_logprobs)
    return record


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return `value` with names for named tuples, and null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
