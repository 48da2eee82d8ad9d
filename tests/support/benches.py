"""What `tvr.bench` needs of a plugin object, on the CPU."""

from __future__ import annotations

import torch

from tvr.backends.torch_ref import plugin
from tvr.bench.buffers import Buffers
from tvr.bench.cells import attention_cells
from tvr.bench.comparison import compare
from tvr.bench.gate import Gate
from tvr.bench.op_cells import op_cells
from tvr.bench.peer import Peer
from tvr.conformance.subject import Subject
from tvr.contract import DeviceFacts

CPU = DeviceFacts(type="cpu")


def small_cell(op, dtype="bfloat16"):
    """A cell that takes a CPU a moment."""
    if not op.startswith("attention"):
        return op_cells([op], dtype=dtype, rows=(3,), megabytes=0, on_cpu=True)[0]
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dims": (32,), "block_sizes": (16,)}
    return attention_cells([op], dtype=dtype, **shape, batches=(2,), ctxs=(40,))[0]


def rows_of(cell, *plugins):
    """The rows of a cell, one for each plugin object."""
    peers = [Peer(Subject(obj, CPU)) for obj in plugins]
    for number, peer in enumerate(peers):
        peer.name = f"{peer.name}-{number}"  # planted faults are all named as the reference
    gate, buffers = Gate(Subject(plugin, CPU)), Buffers(torch.device("cpu"))
    (rows,) = compare([cell], peers, gate, buffers, 0)
    return rows
