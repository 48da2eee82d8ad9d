"""How fast memory lets a model decode: what a step must read, and how fast the device reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tvr.bench.buffers import Buffers
from tvr.bench.ceiling import ceilings
from tvr.bench.header import nvidia_smi_name
from tvr.conformance.tensors import torch_dtype

if TYPE_CHECKING:
    from tvr.bench.engine_model import BenchModel


def memory_limit(model: BenchModel) -> dict[str, Any]:
    """Return the bytes of a step and the measured bandwidth, as fields of a report's header.

    `step_bytes` has the `weights`, each once, and the `kv_per_token` of the context. Of an
    embedding that is not the LM head too, a step reads a few rows, which are left out. Gigabytes
    are taken to measure, and given back: this must come before an engine is loaded.
    """
    config, dtype = model.config, torch_dtype(model.dtype)
    num_weights = config.num_parameters
    if not config.tie_word_embeddings:
        num_weights -= config.vocab_size * config.hidden_size
    device = torch.device(str(model.device))
    ceiling = ceilings(Buffers(device), dtype, nvidia_smi_name(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "ceiling": ceiling,
        "step_bytes": {
            "weights": num_weights * dtype.itemsize,
            "kv_per_token": config.kv_bytes_per_block(1, model.dtype),
        },
    }
