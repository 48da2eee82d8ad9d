"""The file in which a shadow keeps the call at fault, and the call made again from it.

A safetensors file: `in.NAME` are the arguments as they were before, outputs unfilled and caches
cut down to the blocks of interest; `step.NAME` the step's arrays; `found.NAME` and
`reference.NAME` the outputs of the backend and of the reference. The rest is JSON, the metadata
entry `tvr`.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tvr.conformance.attempt import attempt
from tvr.conformance.finding import describe
from tvr.conformance.ledger import FAILED, PASSED, SKIPPED, CheckResult
from tvr.conformance.record import Record
from tvr.conformance.row_tables import TABLES
from tvr.conformance.snapshot import Snapshot
from tvr.conformance.subject import Call, Subject, device_facts
from tvr.contract import PROTOCOLS, SPECS, Bounds, StepMeta, matching_box
from tvr.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.core.plugins import PluginConfig

_VERSION = 1
_STEP_TENSORS = ("block_table", "seq_lens", "cu_seqlens_q")


def save(record: Record, path: Path) -> None:
    """Write a record.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    call = record.snapshot.call
    if "cos_sin_cache" in call.args and len(call["positions"]):  # the rest of it may be long
        end = int(call["positions"].max()) + 1
        call = call.replace(cos_sin_cache=call["cos_sin_cache"][:end])
    step: StepMeta | None = call.args.get("step")
    tensors = {f"in.{n}": a for n, a in call.args.items() if isinstance(a, torch.Tensor)}
    if step is not None:
        tensors |= {f"step.{name}": getattr(step, name) for name in _STEP_TENSORS}
    for group, outputs in (("found", record.found), ("reference", record.reference)):
        tensors |= {f"{group}.{name}": tensor for name, tensor in outputs.items()}
    about = {
        "version": _VERSION,
        "op": call.spec.op,
        "spec": asdict(call.spec),
        "args": {n: a for n, a in call.args.items() if n != "step" and f"in.{n}" not in tensors},
        "step": None if step is None else _host_side(step),
        "bounds": asdict(record.bounds),
        "strides": record.snapshot.strides,
        "aliases": record.snapshot.aliases,
        "finding": record.finding,
    }
    # The format takes neither views nor tensors that share memory.
    copies = {n: t.cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    save_file(copies, path, {"tvr": json.dumps(about)})


def load(path: Path) -> Record:
    """Read a record, on the CPU.

    Raises:
        ConfigError: the file is not there, is no such file, or is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get("tvr")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"{path} cannot be read as the file of a shadow: {e}") from e
    if about is None:
        raise ConfigError(f"{path} is not the file of a shadow; `tvr run --shadow` writes those")
    try:
        return _record(json.loads(about), tensors)
    # Whatever a damaged description leads to, it is the file that is wrong.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        reason = " ".join(str(e).split())  # torch's go over several lines
        raise ConfigError(f"{path} is damaged: {type(e).__name__}: {reason}") from e


def replay(
    path: str | Path,
    backend: object,
    *,
    device: str = "cpu",
    config: PluginConfig | None = None,
) -> CheckResult:
    """Make a file's call again, on any backend, and judge it as the shadow did.

    Args:
        path: a file that a shadow wrote.
        backend: name of an installed backend, or a plugin object.
        device: torch's name of it.
        config: options of installed backends; None: those of the packaged plugins.toml.

    Returns:
        a result of the check "shadow_replay": failed where the fault shows again, passed where
        it does not, skipped where the backend does not declare the op as it was bound, or where
            the reference raised too, so that there is nothing to compare with.

    Raises:
        ConfigError: the file cannot be used.
        PluginError, BackendUnavailable: the backend cannot.
    """
    record, facts = load(Path(path)), device_facts(device)
    if isinstance(backend, str):
        subject = Subject.installed(backend, facts, config)
    else:
        subject = Subject(backend, facts)
    before, where = record.snapshot, subject.torch_device
    spec = before.call.spec

    def result(outcome: str, detail: str = "") -> CheckResult:
        name = Path(path).name
        return CheckResult(
            check="shadow_replay", op=spec.op, case=name, outcome=outcome, detail=detail
        )

    box = matching_box(subject.info, spec, facts)
    if box is None:
        return result(SKIPPED, "; ".join(subject.why_not(spec)))
    here = Snapshot(call=record.call(where), strides=before.strides, aliases=before.aliases)
    live = record.live_call(where)
    run = subject.with_runner(subject.binding(spec, record.bounds)).run
    reference = {name: tensor.to(where) for name, tensor in record.reference.items()}
    outcome = attempt(here, live, lambda: run(live), lambda: reference, box.norm_rounding)
    if outcome.fault is not None:
        return result(FAILED, describe(outcome.fault))
    if outcome.problem:
        return result(FAILED, outcome.problem)
    if not reference:
        return result(
            SKIPPED,
            "it raises nothing here, and no result to compare with was kept: the "
            "reference raised too",
        )
    return result(PASSED)


def _record(about: dict[str, Any], tensors: dict[str, Tensor]) -> Record:
    if about["version"] != _VERSION:
        raise ValueError(f"it has version {about['version']}; this tvr reads {_VERSION}")

    def group(name: str) -> dict[str, Any]:
        prefix = f"{name}."
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    args: dict[str, Any] = {**about["args"], **group("in")}
    if about["step"] is not None:
        args["step"] = StepMeta(**about["step"], **group("step"))
    snapshot = Snapshot(
        call=Call(spec=SPECS[about["op"]](**about["spec"]), args=args),
        strides={name: tuple(strides) for name, strides in about["strides"].items()},
        aliases=about["aliases"],
    )
    record = Record(
        snapshot=snapshot,
        bounds=Bounds(**about["bounds"]),
        found=group("found"),
        reference=group("reference"),
        finding=about["finding"],
    )
    _check_complete(record)
    return record


def _check_complete(record: Record) -> None:
    call = record.live_call(torch.device("cpu"))
    wanted = set(inspect.signature(PROTOCOLS[call.spec.op].__call__).parameters) - {"self"}
    if "packed" in wanted:
        wanted = wanted - {"packed"} | {"weight", "bias"}
    if "tables" in wanted:
        wanted = wanted - {"tables"} | set(TABLES)
    if set(call.args) != wanted:
        raise ValueError(f"it has arguments {sorted(call.args)}, not {sorted(wanted)}")
    shapes = {name: (t.shape, t.dtype) for name, t in call.written.items()}
    for outputs in filter(None, (record.found, record.reference)):
        if {name: (t.shape, t.dtype) for name, t in outputs.items()} != shapes:
            raise ValueError("its outputs have other shapes than the call's")


def _host_side(step: StepMeta) -> dict[str, Any]:
    values = {f.name: getattr(step, f.name) for f in fields(step) if f.name not in _STEP_TENSORS}
    return values | {"seq_lens_cpu": list(step.seq_lens_cpu)}
