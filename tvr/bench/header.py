"""On what, with what and how the rows were measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from tvr.bench.comparison import ROUNDS, SAMPLES_OF_A_ROUND
from tvr.bench.results import SCHEMA
from tvr.bench.timer import LAUNCHES
from tvr.conformance.suite_run import facts_of

if TYPE_CHECKING:
    from tvr.bench.peer import Peer
    from tvr.contract import BackendInfo, DeviceFacts


def header(
    command: str, peers: Sequence[Peer], distributions: dict[str, tuple[str | None, str | None]]
) -> dict[str, Any]:
    """Return the facts of a run that measures ops, as JSON-able data.

    Args:
        command: the command line.
        peers: the backends, the first one being what the others are compared with.
        distributions: package and version of each, by the backend's name.
    """
    subject = peers[0].subject
    protocol = {
        "rounds": ROUNDS,
        "samples_of_a_round": SAMPLES_OF_A_ROUND,
        "least_launches_of_a_sample": LAUNCHES,
    }
    return common_header(command, subject.info, subject.device, distributions, protocol)


def common_header(
    command: str,
    info: BackendInfo,
    device: DeviceFacts,
    distributions: dict[str, tuple[str | None, str | None]],
    protocol: dict[str, Any],
) -> dict[str, Any]:
    """Return the facts of any run; `info`: of one of the backends, `protocol`: how often what."""
    facts = facts_of(info, device)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": facts.device,
        "device_name": facts.device_name,
        "driver": facts.driver,
        "versions": dict(facts.versions),
        "backends": {
            name: {"distribution": package, "version": version}
            for name, (package, version) in distributions.items()
        },
        "protocol": protocol,
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(torch.device(str(device)))
        found["gpu"] = {
            "sm": device.sm,
            "num_sms": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
            "cuda": torch.version.cuda,
        }
    return found


def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache; 0 on a CPU, whose caches nobody measures here."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def nvidia_smi_name(device: torch.device) -> str | None:
    """Return what nvidia-smi calls a GPU, whatever the order that torch sees; None: a CPU."""
    if device.type != "cuda":
        return None
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
