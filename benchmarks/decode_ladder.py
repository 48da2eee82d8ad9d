"""What each idea of the decode kernels brings: `python benchmarks/decode_ladder.py [OUT.json]`.

Needs an NVIDIA GPU and the `pycuda` extra. A rung is the CUDA backend with some ideas left out; all
are measured as `tvr bench attention` measures backends (docs/benchmarks.md). Exit code 1: a rung is
wrong, or failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from tvr.backends.pycuda_raw import decode_shape
from tvr.backends.pycuda_raw.decode import bind_attention_decode
from tvr.backends.pycuda_raw.plugin import PycudaBackend, backend_info
from tvr.bench.buffers import Buffers
from tvr.bench.cells import AttentionCell
from tvr.bench.comparison import compare
from tvr.bench.gate import Gate
from tvr.bench.header import header, l2_bytes
from tvr.bench.peer import Peer
from tvr.bench.report import write_json
from tvr.bench.rows import failed
from tvr.bench.table import format_table
from tvr.conformance.subject import Subject
from tvr.contract import AttentionDecodeSpec, BoundOp, DeviceFacts
from tvr.core.loader import device_facts
from tvr.hookspecs import hookimpl

SIZES = ((1, 1024), (1, 8192), (8, 8192), (64, 4096))
SPEC = AttentionDecodeSpec(
    dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=64, block_size=16
)


class Rung(PycudaBackend):
    """The CUDA backend with some ideas of its decode kernels left out.

    Args:
        name: of the rung.
        max_splits: asked for, whatever the spec says.
        max_stages: slices in a warp's ring, at most; None: as many as fit. With 2, a multiprocessor
            holds one block instead of two, as two so short rings would not cover memory's latency.
    """

    def __init__(
        self, name: str, *, max_splits: int | None = None, max_stages: int | None = None
    ) -> None:
        super().__init__()
        self._info = backend_info(name)
        self._max_splits = max_splits
        self._max_stages = max_stages or decode_shape._MAX_STAGES

    @hookimpl
    def tvr_bind_attention_decode(self, spec: AttentionDecodeSpec, device: DeviceFacts) -> BoundOp:
        with patch.object(decode_shape, "_MAX_STAGES", self._max_stages):
            return bind_attention_decode(
                replace(spec, max_splits=self._max_splits), self._gpu(device)
            )


def rungs() -> list[Rung]:
    """Return the ladder, from the plainest up."""
    return [
        Rung("whole_sequences", max_splits=1),
        Rung("fixed_splits", max_splits=16),
        Rung("balanced_2_stages", max_stages=2),
        Rung("balanced_4_stages", max_stages=4),
        Rung("balanced"),
    ]


def measure(
    ladder: Sequence[Rung], device: DeviceFacts, sizes: Sequence[tuple[int, int]], out: Path | None
) -> int:
    """Print the ladder at each (batch, ctx) of `sizes`, write it to `out`, return the exit code."""
    peers = [Peer(Subject(rung, device)) for rung in ladder]
    where = torch.device(str(device))
    cells = [AttentionCell(spec=SPEC, batch=batch, ctx=ctx) for batch, ctx in sizes]
    gate = Gate(Subject.installed("torch", device))
    found = list(compare(cells, peers, gate, Buffers(where), l2_bytes(where)))
    rows = [row for of_cell in found for row in of_cell]
    print(format_table(found, [peer.name for peer in peers]))
    if out is not None:
        write_json(out, header("python benchmarks/decode_ladder.py", peers, {}), rows)
    return int(failed(rows))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    sys.exit(measure(rungs(), device_facts("cuda"), SIZES, target))
