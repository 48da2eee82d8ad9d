"""`tvr run --input`: many prompts through one engine, results in the order of the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tvr.cli.batch_input import (
    BatchOptions,
    Fields,
    Line,
    check_system,
    fields_of,
    name_of,
    request_of,
)
from tvr.cli.batch_output import Record, Results, error_of, result_record
from tvr.cli.exits import EXIT_FAILED
from tvr.cli.output import remark
from tvr.cli.progress import batch_bar
from tvr.errors import TvrError

if TYPE_CHECKING:
    from tvr.core.llm import LLM


def run_batch(
    options: BatchOptions,
    lines: Sequence[Line],
    output: Path | None,
    *,
    as_json: bool,
    open_llm: Callable[[], LLM],
) -> int:
    """Write the result of each line and return the exit code.

    Args:
        options: what holds for every line.
        lines: the prompts.
        output: file to write or, with `as_json`, to go on with; None or "-": stdout.
        as_json: write a JSON object a line, else the answers' texts.
        open_llm: loads the model; called only if there is something to do.

    Raises:
        ConfigError: the output cannot be used, or there is no chat for the system message.
        KeyboardInterrupt: with every result that was due written.
    """
    keys = [(line[0], options.hash_of(line)) for line in lines]
    results = Results(output, keys, as_json=as_json)
    todo = lines[results.num_done :]
    done = results.num_done
    if done:
        remark(f"{done} of {len(lines)} results are in {output} already")
    if todo:
        with results, open_llm() as llm, batch_bar(len(lines), done) as report:
            check_system(llm, options)
            num_tokens = 0
            try:
                for line, record in _in_order(llm, todo, options):
                    number, _ = line
                    results.write({"line": number, "hash": options.hash_of(line), **record})
                    error = error_of(record)
                    if error is not None and not as_json:
                        remark(f"line {number}: {error}")
                    done += 1
                    num_tokens += record.get("usage", {}).get("completion_tokens", 0)
                    report(done, num_tokens)
            except KeyboardInterrupt:
                if as_json and output is not None:
                    remark(f"stopped; the same command goes on with what is in {output}")
                raise
    if results.num_failed:
        where = '; see their "error"' if as_json else ""
        remark(f"{results.num_failed} of {len(lines)} lines failed{where}")
        return EXIT_FAILED
    return 0


def _in_order(
    llm: LLM, lines: Sequence[Line], options: BatchOptions
) -> Iterator[tuple[Line, Record]]:
    """Yield each line with its result, in order, each as soon as those before it are there."""
    # Enough that the scheduler never lacks one to admit, few enough to forget.
    max_live = 2 * llm.limits.max_num_seqs
    live: dict[str, tuple[int, Fields]] = {}
    ready: dict[int, Record] = {}
    num_added = num_yielded = 0
    while num_yielded < len(lines):
        while num_added < len(lines) and len(live) < max_live:
            index, name = num_added, f"line-{num_added}"
            num_added += 1
            named: Fields = {}
            try:
                fields = fields_of(lines[index], options)
                named = name_of(fields)
                llm.add_request(name, *request_of(fields, llm, options))
                live[name] = (index, named)
            except TvrError as error:
                ready[index] = {**named, "error": str(error)}
        for output in llm.step() if live else ():
            if output.finished:
                index, named = live.pop(output.request_id)
                ready[index] = {**named, **result_record(output)}
        while num_yielded in ready:
            yield lines[num_yielded], ready.pop(num_yielded)
            num_yielded += 1
