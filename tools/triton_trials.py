"""What is tried of the Triton backend's kernels, how it is measured, and what the table then says.

What a kernel looks up in the table is found by binding its op. Its candidates are compiled by many
processes first, then run beside its default as `tvr bench` runs backends: only where they are
right, in captured graphs, over memory that no cache holds. `tune_triton.py` is the command.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from tvr.backends.triton import configs, plugin
from tvr.backends.triton.configs import Key
from tvr.backends.triton.launch import Config, CudaGpu, Gpu, open_gpu
from tvr.backends.triton.rope import tokens_class
from tvr.bench.attention_inputs import attention_calls
from tvr.bench.buffers import Buffers
from tvr.bench.cells import AttentionCell, Cell, attention_cells
from tvr.bench.comparison import compare
from tvr.bench.gate import Gate
from tvr.bench.header import l2_bytes
from tvr.bench.op_cells import HEADS, KV_HEADS, PRODUCTS, Products, op_cells
from tvr.bench.op_inputs import op_calls
from tvr.bench.peer import Peer
from tvr.conformance.binding import step_of
from tvr.conformance.bounds import exact
from tvr.conformance.subject import Call, Subject
from tvr.contract import BackendInfo, BoundOp, DeviceFacts, OpSpec
from tvr.hookspecs import hookimpl

#: (sequences, tokens of each) on which decode is judged, and the prompts of prefill.
DECODE_SIZES = ((1, 1024), (1, 32768), (8, 8192), (64, 1024), (64, 4096))
PREFILL_SIZES = ((1, 2048), (1, 8192))
CPU_SIZES = ((1, 8),)

_HEADS: dict[str, tuple[int, ...]] = {"num_warps": (1, 2, 4), "HEADS": (4, 8, 16, 32)}
_PLAIN = {"num_warps": (4, 8, 16), "BN": (1, 2, 4, 8, 16), "BK": (2048, 4096, 8192)}
#: What is tried of a kernel, by the name under which it looks itself up: every combination; what is
#: not named stays. Of other kernels it is each number halved and doubled, or one less and one more.
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "attention_decode": {
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5, 6),
        "PROGRAMS": (1, 2, 3, 4),
    },
    "attention_prefill": {
        "num_stages": (2, 3, 4),
        "KEYS": (64, 128),
        "LAG": (1, 2),
        "SOURCES": (1, 2),
    },
    "linear_plain": _PLAIN,
    "linear_dot": {
        "num_warps": (4, 8),
        "BN": (8, 16),
        "BK": (1024, 2048, 4096),
        "PARTS": (16, 32),
    },
    "fused_linear": _PLAIN | {"BN": (2, 4, 8, 16)},  # gate and up in turns need an even one
    "silu_mul": {"num_warps": (4, 8), "BLOCK": (1024, 2048, 4096)},
    "rms_norm": {"num_warps": (1, 2, 4, 8, 16)},
    "add_rms_norm": {"num_warps": (1, 2, 4, 8, 16)},
    "rope": _HEADS | {"TOKENS": (1, 4)},
    "kv_write": _HEADS,
    "rope_kv_write": _HEADS | {"TOKENS": (1, 4)},
    "argmax": {"num_warps": (4, 8, 16), "BLOCK": (2048, 4096, 8192)},
    "top_logprobs": {
        "num_warps": (1, 2, 4, 8),
        "SEGMENTS": (4, 8, 16, 32),
        "SEGMENT": (64, 128, 256),
    },
}
MOST_WARPS = 16

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was measured of a key. Times are geometric means over its cells, in us.

    Attributes:
        best: the default, unless a candidate is faster by more than the spread.
        tried: candidates that ran and were right.
        failed: why the others were not, by candidate.
    """

    key: Key
    default: Config
    best: Config
    us: float
    default_us: float
    tried: int
    failed: Mapping[str, str]


class Trial:
    """The Triton backend under another name, with a table of its own.

    Args:
        name: of the backend.
        table: what its ops find when they are bound.
        gpu: opens the device that torch calls by a name.
    """

    def __init__(self, name: str, table: Mapping[Key, Config], gpu: Callable[[str], Gpu]) -> None:
        @hookimpl
        def info() -> BackendInfo:
            return replace(plugin.INFO, name=name)

        @hookimpl
        def bind(spec: OpSpec, device: DeviceFacts) -> BoundOp:
            with patch.object(configs, "shipped", lambda: table):
                return plugin.bind(spec, gpu(str(device)))

        self.tvr_backend_info = info
        for op in plugin.INFO.ops:
            setattr(self, f"tvr_bind_{op}", bind)


class Asked(dict[Key, Config]):
    """An empty table that remembers what was looked up, and the default that was taken."""

    def get(self, key: Key, default: Config) -> Config:  # type: ignore[override]
        self[key] = default
        return default


class CompilingGpu(CudaGpu):
    """Compiles what is launched, into Triton's cache, and launches nothing."""

    def launch(
        self,
        kernel: Any,  # noqa: ANN401
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        with torch.cuda.device(self.device):
            kernel.warmup(*args, grid=grid, **constants, **options)

    def leave_to_l1(self, compiled: None) -> None:
        """Do nothing: no kernel is loaded."""


def cells_of(
    ops: Iterable[str],
    dtype: str,
    head_dims: Sequence[int],
    on_cpu: bool,
    products: Products = PRODUCTS,
) -> list[Cell]:
    """Return what kernels are judged on, in the shape of Llama-3.2-1B; on a CPU very little.

    Matrix products have the sizes of `products`.
    """
    heads, kv_heads = (2, 1) if on_cpu else (HEADS, KV_HEADS)
    cells: list[Cell] = []
    for op in ops:
        if not op.startswith("attention"):
            few: dict[str, Any] = {"rows": (1,), "megabytes": 0} if on_cpu else {}
            cells += op_cells([op], dtype=dtype, on_cpu=on_cpu, products=products, **few)
            continue
        sizes = DECODE_SIZES if op == "attention_decode" else PREFILL_SIZES
        for head_dim, (batch, ctx) in product(head_dims, CPU_SIZES if on_cpu else sizes):
            cells += attention_cells(
                [op],
                dtype=dtype,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dims=[head_dim],
                block_sizes=[16],
                batches=[batch],
                ctxs=[ctx],
            )
    return cells


def keys_of(cells: Iterable[Cell], gpu: Gpu) -> dict[Key, tuple[Config, list[Cell]]]:
    """Return what is looked up when the cells' ops are bound: the default, and the cells."""
    found: dict[Key, tuple[Config, list[Cell]]] = {}
    for cell in cells:
        asked = Asked()
        with patch.object(configs, "shipped", return_value=asked):
            plugin.bind(cell.spec, gpu)
        for key, default in asked.items():
            if not key[0].startswith(cell.spec.op):
                continue  # a fused product's default is what is best for the plain one
            # A kernel for some count of rows is bound for others too, but not run.
            rows, shape = cell.fields.get("rows"), dict(key[2])
            tokens = tokens_class(rows) if rows else None
            if shape.get("rows") in (None, rows) and shape.get("tokens") in (None, tokens):
                found.setdefault(key, (default, []))[1].append(cell)
    return found


def candidates(name: str, default: Config) -> list[Config]:
    """Return what is tried beside `default` of what looks itself up as `name`."""
    numbers = {
        "num_warps": default.num_warps,
        "num_stages": default.num_stages,
        **default.blocks,
    }
    if name in SPACES:
        values = [SPACES[name].get(axis, (n,)) for axis, n in numbers.items()]
        tried = [dict(zip(numbers, chosen, strict=True)) for chosen in product(*values)]
    else:
        tried = []
        for axis, n in numbers.items():
            nearby = (n - 1, n + 1) if axis == "num_stages" else (n // 2, 2 * n)
            tried += [numbers | {axis: other} for other in nearby]
    made = [Config(of.pop("num_warps"), of.pop("num_stages"), of) for of in tried]
    return [config for config in made if config != default and _is_possible(config)]


def _is_possible(config: Config) -> bool:
    counts = (config.num_warps, config.num_stages, *config.blocks.values())
    return min(counts) >= 1 and config.num_warps <= MOST_WARPS


def compile_all(
    jobs: Sequence[tuple[Key, Config, Sequence[Cell]]], device: DeviceFacts, num_processes: int
) -> Iterator[str]:
    """Compile what each job's cells launch with its configuration; yield why it failed, or ""."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=fresh) as pool:
        yield from pool.map(partial(_compile, device=device), jobs)


def _compile(job: tuple[Key, Config, Sequence[Cell]], device: DeviceFacts) -> str:
    key, config, cells = job
    try:
        subject = Subject(Trial("compiling", {key: config}, _compiling_gpu), device)
        for cell in cells:
            (call,) = _calls(cell, Buffers(subject.torch_device))
            binding = subject.binding(cell.spec, exact(step_of(call)))
            binding(call)
    except Exception as error:
        return _says(error)
    return ""


@cache
def _compiling_gpu(device: str) -> Gpu:
    return CompilingGpu(torch.device(device).index)


def _calls(cell: Cell, buffers: Buffers) -> list[Call]:
    if isinstance(cell, AttentionCell):
        return attention_calls(cell, buffers, 1)
    return op_calls(cell, buffers, 1)


def judge(
    key: Key, tried: Sequence[Config], rows: Sequence[Sequence[Row]], failed: Mapping[str, str]
) -> Finding:
    """Return what to take of `tried`, whose first is the default.

    Args:
        rows: of each cell, one for each of `tried`.
        failed: why others could not be tried.
    """
    names, default = [str(config) for config in tried], tried[0]
    wrong = {
        name: why
        for name, of_config in zip(names, zip(*rows, strict=True), strict=True)
        if (why := next((row["error"] for row in of_config if "error" in row), ""))
    }
    if names[0] in wrong:
        raise SystemExit(f"the default of {key[0]} failed: {wrong[names[0]]}")

    def mean(i: int, field: str) -> float:
        return math.exp(sum(math.log(row[i][field]) for row in rows) / len(rows))

    right = [i for i, name in enumerate(names) if name not in wrong]
    best = min(right, key=lambda i: mean(i, "us"))
    if mean(best, "p90_us") >= mean(0, "p10_us"):
        best = 0
    return Finding(
        key=key,
        default=default,
        best=tried[best],
        us=round(mean(best, "us"), 3),
        default_us=round(mean(0, "us"), 3),
        tried=len(right),
        failed={**failed, **wrong},
    )


def tune(cells: Sequence[Cell], device: DeviceFacts, num_processes: int) -> Iterator[Finding]:
    """Yield what was found of each key that the cells' ops look up."""
    keys = keys_of(cells, open_gpu(str(device)))
    found = {key: candidates(key[0], default) for key, (default, _) in keys.items()}
    jobs = [(key, config, keys[key][1]) for key, tried in found.items() for config in tried]
    failed: dict[Key, dict[str, str]] = {key: {} for key in keys}
    if device.type == "cuda" and jobs:
        for (key, config, _), why in zip(
            jobs, compile_all(jobs, device, num_processes), strict=True
        ):
            if why:
                failed[key][str(config)] = why
    gate = Gate(Subject.installed("torch", device))
    buffers = Buffers(torch.device(str(device)))
    for key, (default, of_key) in keys.items():
        tried = [default, *(c for c in found[key] if str(c) not in failed[key])]
        peers = [
            Peer(Subject(Trial(f"trial{i}", {key: config}, open_gpu), device))
            for i, config in enumerate(tried)
        ]
        rows = list(compare(of_key, peers, gate, buffers, l2_bytes(buffers.device)))
        yield judge(key, tried, rows, failed[key])


def entry(finding: Finding) -> Row:
    """Return what the table says of a finding."""
    op, sm, shape = finding.key
    best = finding.best
    blocks = dict(best.blocks)
    config = {"num_warps": best.num_warps, "num_stages": best.num_stages, "blocks": blocks}
    times = {"us": finding.us, "default_us": finding.default_us}
    return {"op": op, "sm": sm, "shape": dict(sorted(shape)), **config, **times}


def merged(text: str, findings: Sequence[Finding], sm: int, facts: Mapping[str, str]) -> str:
    """Return a table's text with these findings in place of earlier ones.

    Args:
        text: of a table that `read_table` takes.
        findings: on one architecture.
        sm: that architecture.
        facts: on what GPU and with which versions they were measured. What others measured on this
            architecture goes.
    """
    table = json.loads(text)
    header, name = table["header"], f"sm_{sm}"
    new = {finding.key for finding in findings}
    kept = [
        e
        for e in table["entries"]
        if configs.key(e["op"], e["sm"], e["shape"]) not in new
        and (e["sm"] != sm or header[name] == facts)
    ]
    faster = [entry(f) for f in findings if f.best != f.default]
    entries = sorted([*kept, *faster], key=lambda e: (e["sm"], e["op"], sorted(e["shape"].items())))
    lines = ",\n".join(map(json.dumps, entries))
    head = json.dumps({**header, name: facts}, indent=1)
    return f'{{"header": {head},\n"entries": [\n{lines}\n]}}\n'


def line(finding: Finding) -> str:
    """Return a finding as a line to read."""
    op, sm, shape = finding.key
    of = " ".join(f"{name}={value}" for name, value in sorted(shape))
    kept = "the default stays" if finding.best == finding.default else str(finding.best)
    return (
        f"{op} sm_{sm} {of}: {finding.default_us} -> {finding.us} us, {kept}; "
        f"{finding.tried} ran, {len(finding.failed)} failed"
    )


def _says(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
