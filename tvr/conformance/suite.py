"""The list of all checks, and the door to it that needs neither pytest nor a plugin manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tvr.conformance import (
    checks_attention,
    checks_batching,
    checks_common,
    checks_dense,
    checks_kv,
    checks_needles,
    checks_norm,
    checks_paging,
    checks_rope,
)
from tvr.conformance.case import LEVELS, Case
from tvr.conformance.cases import cases
from tvr.conformance.ledger import FAILED, PASSED, SKIPPED, Check, CheckFailed, CheckResult
from tvr.conformance.subject import Subject
from tvr.contract import OPS, DeviceFacts, declared_flags
from tvr.errors import BackendUnavailable, ConfigError

CHECKS: tuple[Check, ...] = (
    *checks_common.CHECKS,
    *checks_norm.CHECKS,
    *checks_rope.CHECKS,
    *checks_kv.CHECKS,
    *checks_dense.CHECKS,
    *checks_attention.CHECKS,
    *checks_batching.CHECKS,
    *checks_paging.CHECKS,
    *checks_needles.CHECKS,
)


def check_backend(
    obj: object,
    *,
    ops: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    level: str = "smoke",
    device: str = "cpu",
) -> list[CheckResult]:
    """Run every check that applies to a backend and return what became of each.

    Args:
        obj: the plugin object: a module, an instance or a class with hooks, as tvr loads it.
        ops: ops to check; None: all of the contract.
        checks: names of the checks to run; None: all that judge these ops.
        level: "smoke", "quick" or "full"; each runs the ones before it too.
        device: torch's name of the device: "cpu", "cuda", "cuda:1".

    Raises:
        ConfigError: an unknown op, check, level or device, or nothing to check.
        PluginError: `obj` is no backend that tvr would load.
        BackendUnavailable: the backend's probe says that it cannot run on the device.
    """
    _refuse_unknown("op", ops or (), OPS)
    _refuse_unknown("check", checks or (), [check.name for check in CHECKS])
    _refuse_unknown("level", (level,), LEVELS)
    backend = Subject(obj, _device_facts(device))
    chosen = [check for check in CHECKS if checks is None or check.name in checks]
    results = []
    for op in OPS if ops is None else ops:
        found = list(_check_op(backend, op, chosen, level))
        results += [result for _, result in found]
        was_run = any(not check.of_declaration and r.outcome != SKIPPED for check, r in found)
        if checks is None and op in backend.info.ops and not was_run:
            results.append(_not_run(op, level))
    if not results:
        raise ConfigError("check_backend: none of the checks asked for judges any op asked for")
    return results


def _check_op(
    backend: Subject, op: str, checks: Sequence[Check], level: str
) -> Iterator[tuple[Check, CheckResult]]:
    for case in cases(op, level):
        for check in checks:
            if op in check.ops and check.applies(case):
                yield check, _run(backend, check, case)


def _not_run(op: str, level: str) -> CheckResult:
    return CheckResult(
        check="declared_op_is_checked",
        op=op,
        case="",
        outcome=FAILED,
        detail=f"{op} is declared, but no check was run on a case at level {level!r}",
    )


def _run(backend: Subject, check: Check, case: Case) -> CheckResult:
    outcome, detail = PASSED, ""
    if not check.of_declaration and (reasons := _why_skipped(backend, check, case)):
        outcome, detail = SKIPPED, "; ".join(reasons)
    else:
        try:
            check.run(backend, case)
        except CheckFailed as e:
            outcome, detail = FAILED, str(e)
        except (Exception, SystemExit) as e:  # what a backend raises is its failure alone
            outcome, detail = FAILED, f"raised {type(e).__name__}: {e}"
    return CheckResult(check=check.name, op=case.op, case=case.name, outcome=outcome, detail=detail)


def _why_skipped(backend: Subject, check: Check, case: Case) -> list[str]:
    reasons = backend.why_not(case.spec)
    if not reasons and check.also is not None:
        reasons = backend.why_not(check.also(case))
    flags = declared_flags(backend.info, case.spec, backend.device)
    if not reasons and check.flag is not None and check.flag not in flags:
        return [f"is not declared {check.flag}"]
    return reasons


def _device_facts(device: str) -> DeviceFacts:
    try:
        asked = torch.device(device)
    except RuntimeError as e:
        raise ConfigError(f"device {device!r} is not known to torch: {e}") from e
    if asked.type != "cuda":
        return DeviceFacts(type=asked.type)
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"device {device!r} was asked for, but torch sees no CUDA device")
    index = torch.cuda.current_device() if asked.index is None else asked.index
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return DeviceFacts(type="cuda", index=index, sm=10 * major + minor, name=name)


def _refuse_unknown(what: str, asked: Sequence[str], known: Sequence[str]) -> None:
    unknown = [value for value in asked if value not in known]
    if unknown:
        raise ConfigError(
            f"check_backend: unknown {what} {unknown[0]!r}; known: {', '.join(known)}"
        )
