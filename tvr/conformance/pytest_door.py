"""The two ways into the suite from pytest: the options of a run, and a mark for one's own tests.

Each gives one parameter for each check of each op, with the id `op-check`.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tvr.conformance.expected import Expected, load_expected
from tvr.conformance.isolate import IsolatedSuite
from tvr.conformance.pytest_check import Conformance, ConformanceCheck, Runner
from tvr.conformance.report import reproduction, reproduction_in_python
from tvr.conformance.selection import Selection
from tvr.conformance.subject import Subject, device_facts
from tvr.conformance.suite import IS_CHECKED, Unit, run_unit
from tvr.conformance.task import Task
from tvr.contract import OPS
from tvr.errors import ConfigError

if TYPE_CHECKING:
    import pytest  # an extra: `check_backend`, in the same package, does without it


def checks_of_options(config: pytest.Config) -> list[object]:
    """Return the parameters that the options of `_tvr_pytest` ask for; the backend is loaded.

    Raises:
        TvrError: no backend was named, or it cannot be used, or another option is not acceptable.
    """
    option = config.option
    if getattr(option, "tvr_backend", None) is None:
        raise ConfigError(
            "no backend to test; name one: pytest --pyargs tvr.conformance --tvr-backend NAME"
        )
    stack = ExitStack()
    config.add_cleanup(stack.close)
    conformance = _conformance(
        option.tvr_backend,
        Selection(
            ops=None if option.tvr_op is None else tuple(option.tvr_op),
            level=option.tvr_level,
            seed=option.tvr_seed,
            max_examples=option.tvr_max_examples,
        ),
        device=option.tvr_device,
        plugins=option.tvr_plugins,
        expected=load_expected(option.tvr_expect) if option.tvr_expect else (),
        in_process=option.tvr_in_process,
        stack=stack,
        expect=option.tvr_expect,
    )
    conformance.load()
    return _parameters(conformance)


def parametrize_checks(
    backend: object,
    *,
    ops: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    level: str = "smoke",
    device: str = "cpu",
    seed: int = 0,
    max_examples: int | None = None,
    expected_failures: Sequence[Expected] = (),
    plugins: str | Path | None = None,
    in_process: bool = False,
) -> pytest.MarkDecorator:
    """Return a mark that gives a test each check of each op in turn, as `check`: call it.

    Args:
        backend: name of an installed backend, or a plugin object as `check_backend` takes it.
        ops, checks, level, device, seed, max_examples: as for `check_backend`.
        expected_failures: strict: one that passes fails the test.
        plugins: a plugins.toml to use; for a backend given by name.
        in_process: run a backend given by name in this process, where a debugger can follow it
            and a crash ends pytest; an object always is.

    Raises:
        ConfigError: an unknown op, check or level, or nothing to check.
    """
    import pytest

    stack = ExitStack()
    atexit.register(stack.close)  # a mark has no end of its own
    conformance = _conformance(
        backend,
        Selection(
            ops=None if ops is None else tuple(ops),
            checks=None if checks is None else tuple(checks),
            level=level,
            seed=seed,
            max_examples=max_examples,
        ),
        device=device,
        plugins=plugins,
        expected=expected_failures,
        in_process=in_process,
        stack=stack,
    )
    return pytest.mark.parametrize("check", _parameters(conformance))


def _parameters(conformance: Conformance) -> list[object]:
    import pytest

    tests = list(conformance.units)
    if conformance.selection.checks is None:
        ops = dict.fromkeys(unit.op for unit in tests)
        tests += [Unit(op, IS_CHECKED) for op in ops if op in OPS]
    return [
        pytest.param(ConformanceCheck(conformance, unit), id=f"{unit.op}-{unit.check}")
        for unit in tests
    ]


def _conformance(
    backend: object,
    selection: Selection,
    *,
    device: str,
    plugins: str | Path | None,
    expected: Sequence[Expected],
    in_process: bool,
    stack: ExitStack,
    expect: str | None = None,
) -> Conformance:
    """Return the tests of a backend; it is loaded later, and closed with `stack`."""
    level, max_examples = selection.level, selection.max_examples
    if not isinstance(backend, str):
        load = partial(_load_object, backend, device, selection)
        call = partial(
            reproduction_in_python, level=level, device=device, max_examples=max_examples
        )
        return Conformance(load, selection, expected, call)
    path = None if plugins is None else str(plugins)
    task = Task(backend=backend, device=device, plugins=path, selection=selection)
    load = partial(_load_here, task) if in_process else partial(_load_isolated, task, stack)
    line = partial(
        reproduction,
        level=level,
        device=device,
        plugins=plugins,
        expect=expect,
        max_examples=max_examples,
    )
    return Conformance(load, selection, expected, line)


def _load_isolated(task: Task, stack: ExitStack) -> Runner:
    suite = stack.enter_context(IsolatedSuite(task))
    return Runner(task.backend, suite.facts.declared, suite.run)


def _load_here(task: Task) -> Runner:
    subject, _ = task.load()
    return _runner(subject, task.selection)


def _load_object(plugin: object, device: str, selection: Selection) -> Runner:
    return _runner(Subject(plugin, device_facts(device)), selection)


def _runner(subject: Subject, selection: Selection) -> Runner:
    info = subject.info
    return Runner(info.name, list(info.ops), lambda unit: run_unit(subject, unit, selection))
