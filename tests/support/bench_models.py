"""Small models for `tvr.bench`: a config.json, random weights, backends with planted faults."""

from __future__ import annotations

import json
from dataclasses import replace

from support.faults import faulty
from tvr.bench.engine_model import BenchModel
from tvr.core.llm import LLM
from tvr.hookspecs import hookimpl

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def save_config(path, **sizes):
    """Write the config.json of a small Llama, and nothing else; return the folder."""
    path.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    return path


def open_model(path, *, dtype="float32", max_model_len=None):
    """Return a model of random weights, ready to be measured."""
    return BenchModel.open(
        path,
        name=path.name,
        device="cpu",
        dtype=dtype,
        load_format="dummy",
        max_model_len=max_model_len,
        plugins=None,
    )


def with_fault(fault):
    """Return a backend named "faulty" that is the reference but for a planted fault.

    Where the fault is in a part of `rope_kv_write` that is not bound as a whole.
    """
    plugin = faulty(fault)
    info = plugin.tvr_backend_info()
    ops = dict(info.ops)
    if fault.op in ("rope", "kv_write"):
        del ops["rope_kv_write"], plugin.tvr_bind_rope_kv_write
    info = replace(info, name="faulty", ops=ops)
    plugin.tvr_backend_info = hookimpl(lambda: info)
    return plugin


def engine_with(model, plugin, *, max_num_seqs=8):
    """Return an engine on the model whose every op is the plugin object's."""
    return LLM(
        model.path,
        backend=plugin.tvr_backend_info().name,
        plugins=[plugin],
        dtype=model.dtype,
        device="cpu",
        load_format="dummy",
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
    )
