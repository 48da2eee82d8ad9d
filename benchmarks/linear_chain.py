"""All matrix products of a decode step, one behind the other in one CUDA graph.

    python benchmarks/linear_chain.py OUT.json [--backend NAME ...] [--device cpu] [--tiny]

The shapes are those of Llama-3.2-1B in bf16: 16 layers of qkv, o, gate_up and down, then the LM
head, each with a weight of its own (2.5 GB), so that nothing is found in the L2 cache; x of each is
a slice of the result before it. Nothing else runs, no norm and no attention. "step" is the time of
one replay; below it stands each kind of product by itself, one in each layer, in us per product.

Gate, timers and turns are those of `tvr bench` (docs/benchmarks.md); every product of the step is
judged. Exit code 1: one is wrong, or something failed. `--tiny` is for a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tvr.bench.cells import RowsCell
from tvr.bench.comparison import says, take_turns
from tvr.bench.gate import Gate
from tvr.bench.gpu_timer import EventTimer, GraphTimer
from tvr.bench.header import header
from tvr.bench.op_cells import LINEARS
from tvr.bench.peer import Entry, Peer
from tvr.bench.report import write_json
from tvr.bench.rows import Row, failed, measured, not_measured
from tvr.bench.table import format_table
from tvr.bench.timer import Timer, WallTimer
from tvr.conformance.binding import step_of
from tvr.conformance.bounds import exact
from tvr.conformance.subject import Call, Subject
from tvr.conformance.tensors import torch_dtype
from tvr.contract import DeviceFacts, LinearSpec
from tvr.core.loader import device_facts

KINDS = ("qkv", "o", "gate_up", "down", "lm_head")
LAYERS = 16
ROWS = (1, 8)
MOST_ROWS = 8  # as core binds it: one op for all small batches
BACKENDS = ("triton", "pycuda", "torch")
TINY_LAYERS, TINY_LINEARS = 2, ((64, 96), (64, 64), (64, 256), (128, 64), (64, 200))

Kinds = dict[str, list[Call]]


def step_calls(
    rows: int,
    device: torch.device,
    *,
    layers: int = LAYERS,
    linears: Sequence[tuple[int, int]] = LINEARS,
    dtype: str = "bfloat16",
) -> Kinds:
    """Return the calls of one step by kind, a call a layer; `linears`: in and out of each kind.

    Numbers keep their size from layer to layer: a weight's variance is one over its width.
    """
    generator = torch.Generator(device).manual_seed(0)
    own = {"dtype": torch_dtype(dtype), "device": device}
    x = torch.empty(rows, linears[0][0], **own).normal_(generator=generator)
    calls: Kinds = {kind: [] for kind in KINDS}
    for kind in [*KINDS[:-1] * layers, KINDS[-1]]:
        n_in, n_out = linears[KINDS.index(kind)]
        spec = LinearSpec(dtype=dtype, in_features=n_in, out_features=n_out, max_rows=MOST_ROWS)
        weight = torch.empty(n_out, n_in, **own).normal_(std=n_in**-0.5, generator=generator)
        out = torch.empty(rows, n_out, **own)
        args = {"x": x[:, :n_in], "weight": weight, "bias": None, "out": out}
        calls[kind].append(Call(spec=spec, args=args))
        x = out
    return calls


def in_order(calls: Kinds) -> list[Call]:
    """Return the calls as a step makes them."""
    *per_layer, last = (calls[kind] for kind in KINDS)
    return [call for layer in zip(*per_layer, strict=True) for call in layer] + last


@dataclass(frozen=True)
class Part:
    """What is timed: `calls`, launched `of` times to a figure."""

    name: str
    calls: Sequence[Call]
    of: int

    @property
    def cell(self) -> RowsCell:
        """What one figure moves and computes."""
        specs = [call.spec for call in self.calls]
        rows, item = len(self.calls[0]["x"]), self.calls[0]["x"].element_size()
        weights = sum(s.in_features * s.out_features for s in specs)  # type: ignore[attr-defined]
        ends = sum(s.in_features + s.out_features for s in specs)  # type: ignore[attr-defined]
        return RowsCell(
            spec=specs[0],
            rows=rows,
            num_bytes=(weights + rows * ends) * item // self.of,
            num_flops=2 * rows * weights // self.of,
            shape=(),
        )

    def row(self, row: Row) -> Row:
        """Return a row of this part with its name."""
        return {**row, "part": self.name}


def parts_of(calls: Kinds) -> list[Part]:
    """Return the whole step, and each kind of product."""
    kinds = [Part(kind, calls[kind], of=len(calls[kind])) for kind in KINDS]
    return [Part("step", in_order(calls), of=1), *kinds]


class Chain:
    """One backend, its products bound and in order."""

    def __init__(self, peer: Peer, calls: Kinds) -> None:
        self._subject = peer.subject
        self._stream = peer.subject.stream
        if self._stream is None and peer.subject.device.type == "cuda":
            self._stream = torch.cuda.Stream(peer.subject.torch_device)
        self._launches: dict[int, Callable[[], object]] = {}
        self._synchronize()  # inputs were made on another stream
        with torch.cuda.stream(self._stream):  # None changes nothing
            for of_kind in calls.values():
                step = step_of(of_kind[0])
                self._binding = peer.subject.binding(of_kind[0].spec, exact(step))
                self._binding.plan(step)
                self._launches |= {id(call): self._binding.prepare(call) for call in of_kind}

    def enter(self, part: Part, gate: Gate) -> Entry:
        """Return `part` ready to be timed.

        Raises:
            CheckFailed: a result is wrong.
        """
        timer = self._timer([self._launches[id(call)] for call in part.calls], part.of)
        gate.poison(part.calls)
        self._synchronize()
        timer.once()
        self._synchronize()
        for call in part.calls:
            gate.judge(self._subject, [call])
        return Entry(timer=timer, binding=self._binding)

    def _timer(self, launches: Sequence[Callable[[], object]], of: int) -> Timer:
        """Return what times all of `launches`, once, as `of` launches."""

        def run() -> None:
            for launch in launches:
                launch()

        grouped = [run] if of == 1 else launches
        if self._stream is None:
            return WallTimer(grouped, len(grouped))
        try:
            return GraphTimer(grouped, 1, self._stream)
        except Exception as error:  # whatever the backend did in the capture
            return EventTimer(grouped, len(grouped), self._stream, says(error))

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._subject.torch_device)


def compare(peers: Sequence[Peer], calls: Kinds, gate: Gate) -> list[list[Row]]:
    """Return the rows of each part, one for each backend, measured in turn."""
    parts = parts_of(calls)
    entries: dict[tuple[str, str], Entry] = {}
    errors: dict[tuple[str, str], str] = {}
    for peer in peers:
        try:
            chain = Chain(peer, calls)
            for part in parts:
                entries[peer.name, part.name] = chain.enter(part, gate)
        except (Exception, SystemExit) as error:
            errors |= {(peer.name, p.name): says(error) for p in parts}
    for part in parts:
        of_part = [(peer.name, part.name) for peer in peers]
        errors |= take_turns({at: entries[at] for at in of_part if at not in errors})

    def row(peer: Peer, part: Part) -> Row:
        at = peer.name, part.name
        if at in errors:
            return part.row(not_measured(part.cell, peer.name, error=errors[at]))
        return part.row(measured(part.cell, peer.name, entries[at], len(part.calls)))

    return [[row(peer, part) for peer in peers] for part in parts]


def describe(found: dict[str, Any]) -> str:
    """Return the line above the table: on what, and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['device_name']} ({found['device']}), driver {found['driver']}; {versions}"


def measure(peers: Sequence[Peer], device: DeviceFacts, out: Path, **sizes: Any) -> int:  # noqa: ANN401
    """Print and write what all rows of ROWS take, return the exit code; `sizes`: `step_calls`'."""
    found = header(f"python {' '.join(sys.argv)}", peers, {})
    print(describe(found))
    gate = Gate(Subject.installed("torch", device))
    cells: list[list[Row]] = []
    for rows in ROWS:
        cells += compare(peers, step_calls(rows, torch.device(str(device)), **sizes), gate)
    print(format_table(cells, [peer.name for peer in peers]))
    flat = [row for of_part in cells for row in of_part]
    write_json(out, found, flat)
    return int(failed(flat))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("--backend", action="append", help=f"default: {', '.join(BACKENDS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two small layers, fp16")
    args = parser.parse_args()
    device = device_facts(args.device)
    peers = [Peer(Subject.installed(name, device)) for name in args.backend or BACKENDS]
    tiny = {"layers": TINY_LAYERS, "linears": TINY_LINEARS, "dtype": "float16"}
    sys.exit(measure(peers, device, args.out, **(tiny if args.tiny else {})))


if __name__ == "__main__":
    main()
