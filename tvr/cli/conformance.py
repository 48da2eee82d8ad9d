"""`tvr conformance`: does a backend keep the contract?"""

from __future__ import annotations

import importlib.util
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvr.cli import options
from tvr.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from tvr.cli.output import check_can_write
from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.conformance.ledger import CheckResult
    from tvr.conformance.selection import Selection
    from tvr.conformance.suite import Unit
    from tvr.conformance.suite_run import Facts, SuiteRun
    from tvr.conformance.task import Task

    RunUnits = Callable[[Sequence[Unit]], Iterator[tuple[Unit, list[CheckResult]]]]


def conformance(
    *,
    backend: Annotated[str, typer.Option(metavar="NAME", help="The installed backend to check.")],
    op: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP", help="Only this op, or engine; several with commas or given again."
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Only this check; several as with --op."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="CASE", help="Only this case of one --op; may be given again."),
    ] = None,
    level: Annotated[
        str, typer.Option(metavar="NAME", help="smoke, quick or full: how many cases.")
    ] = "smoke",
    seed: Annotated[
        int, typer.Option(metavar="N", help="Equal seeds draw equal cases and numbers.")
    ] = 0,
    max_examples: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Cases drawn for each check of each op. Default: as --level says."
        ),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Failures expected, as TOML; each must then fail."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report to look at.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:N.")] = "cpu",
    plugins: options.Plugins = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Make the one call again that `tvr run --shadow` kept in FILE."
        ),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="Run without a child process, as for a debugger."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", help="Most seconds for a case before it has hung. Default: 300."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Child processes that share the work. Default: up to 4; on a GPU 1."
        ),
    ] = None,
    debug: options.Debug = False,
) -> int:
    """Run the conformance suite over an installed backend.

    Exit code 0 only if every declared op that was asked for was checked and passed.
    """
    from tvr.cli.conformance_text import print_run
    from tvr.conformance.expected import apply_expected, load_expected, of_undeclared
    from tvr.conformance.report_html import write_html
    from tvr.conformance.report_json import write_json
    from tvr.conformance.selection import Selection
    from tvr.conformance.task import Task
    from tvr.core.plugin_config import find_config

    config = find_config(plugins, os.environ)
    if replay is not None:
        from tvr.cli.replay import replay_file

        suite_only = {
            **{"--op": op, "--check": check, "--case": case, "--expect": expect},
            **{"--json": json_file, "--html": html_file, "--in-process": in_process or None},
            **{"--max-examples": max_examples, "--timeout": timeout, "--seed": seed or None},
            "--jobs": jobs,
            "--level": None if level == "smoke" else level,
        }
        if given := [name for name, value in suite_only.items() if value is not None]:
            raise ConfigError(f"--replay makes one call again; drop {', '.join(given)}")
        return replay_file(replay, backend, device=device, plugins=config)
    selection = Selection(
        ops=options.listed(op),
        checks=options.listed(check),
        cases=None if case is None else tuple(case),
        level=level,
        seed=seed,
        max_examples=max_examples,
    )
    _check_can_draw(selection)
    for name, value in {"--timeout": timeout, "--jobs": jobs}.items():
        if in_process and value is not None:
            raise ConfigError(f"{name} is of child processes, and --in-process has none; drop one")
    expected = [] if expect is None else load_expected(expect)
    check_can_write({"--json": json_file, "--html": html_file})
    task = Task(
        backend=backend,
        device=device,
        plugins=None if config is None else str(config),
        selection=selection,
    )
    run, num_left = _run(
        task,
        in_process=in_process,
        timeout=timeout,
        jobs=jobs,
        judge=lambda found: apply_expected(found, expected, all_cases=case is None),
    )
    reproduce = partial(_reproduce, task=task, expect=expect, timeout=timeout)
    if num_left:
        print_run(run, reproduce, num_left=num_left)
        return EXIT_INTERRUPTED
    run.results.extend(of_undeclared(expected, run.declared, run.results, seed=seed))
    try:
        if json_file is not None:
            write_json(json_file, run)
        if html_file is not None:
            write_html(html_file, run, reproduce)
    finally:  # where the disk is full, the work is not lost
        print_run(run, reproduce)
    return 0 if run.passed else EXIT_FAILED


def _run(
    task: Task,
    *,
    in_process: bool,
    timeout: float | None,
    jobs: int | None,
    judge: Callable[[Iterable[CheckResult]], list[CheckResult]],
) -> tuple[SuiteRun, int]:
    """Return the run, and how many checks an interrupt left undone."""
    from tvr.cli.progress import suite_bar
    from tvr.conformance.suite import missing_checks, units
    from tvr.conformance.suite_run import SuiteRun

    selection = task.selection
    chosen = units(selection)
    started, began = datetime.now(timezone.utc), time.monotonic()
    options.allow_interrupts()
    found: dict[Unit, list[CheckResult]] = {}
    with _suite(task, in_process, timeout, jobs) as (facts, run_units):
        _refuse_undeclared(facts, selection)
        with suppress(KeyboardInterrupt), suite_bar(len(chosen)) as report:
            num_failed = 0
            for unit, results in run_units(chosen):
                found[unit] = results
                num_failed += any(result.failed for result in results)
                report(len(found), f"{num_failed} failed, {unit.op}: {unit.check}")
    results = [result for unit in chosen for result in found.get(unit, [])]
    num_left = len(chosen) - len(found)
    if not num_left:
        results = judge([*results, *missing_checks(facts.declared, results, selection)])
    run = SuiteRun(
        **asdict(facts),
        **asdict(selection),
        started=started.isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        results=results,
    )
    return run, num_left


@contextmanager
def _suite(
    task: Task, in_process: bool, timeout: float | None, jobs: int | None
) -> Iterator[tuple[Facts, RunUnits]]:
    """Yield the facts of the loaded backend, and what runs units on it."""
    if in_process:
        from tvr.conformance.suite import run_unit

        subject, facts = task.load()
        yield (
            facts,
            lambda chosen: ((u, list(run_unit(subject, u, task.selection))) for u in chosen),
        )
        return
    from tvr.conformance.crew import Crew, default_jobs
    from tvr.conformance.isolate import TIMEOUT_S

    jobs = default_jobs(task.device) if jobs is None else jobs
    with Crew(task, jobs=jobs, timeout=TIMEOUT_S if timeout is None else timeout) as crew:
        yield crew.facts, crew.run


def _reproduce(
    result: CheckResult, *, task: Task, expect: Path | None, timeout: float | None
) -> str:
    """Return the line that runs a failed case again, under all that can make it fail."""
    from tvr.conformance.report import reproduction

    line = reproduction(
        result,
        backend=task.backend,
        level=task.selection.level,
        device=task.device,
        plugins=task.plugins,
        max_examples=task.selection.max_examples,
    )
    more = [] if expect is None else ["--expect", str(expect)]
    more += [] if timeout is None else ["--timeout", f"{timeout:g}"]
    return f"{line} {shlex.join(more)}".rstrip()


def _check_can_draw(selection: Selection) -> None:
    if selection.examples and importlib.util.find_spec("hypothesis") is None:
        raise ConfigError(
            "hypothesis draws the cases, and is not installed; pip install 'tvr[conformance]', in "
            "a clone pip install -e '.[conformance]', or use --max-examples 0"
        )


def _refuse_undeclared(facts: Facts, selection: Selection) -> None:
    from tvr.contract import OPS

    undeclared = [op for op in selection.ops or () if op in OPS and op not in facts.declared]
    if undeclared:
        raise ConfigError(
            f"backend {facts.backend!r} does not declare {', '.join(undeclared)}; it declares "
            f"{', '.join(facts.declared) or 'nothing'}"
        )
