"""From a checkpoint and an `EngineConfig` to the parts of a running engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike

import torch

from tvr.contract import Bounds, DeviceFacts
from tvr.core.batch import DeviceTables
from tvr.core.checkpoint_source import open_checkpoint
from tvr.core.chunk_graphs import padded
from tvr.core.config import ModelConfig
from tvr.core.engine_config import EngineConfig
from tvr.core.garbage import frozen_objects
from tvr.core.graph_capture import CudaCapture, obstacles, partial_obstacles, unwanted
from tvr.core.hub import resolve_model
from tvr.core.kv_cache import KVCache
from tvr.core.largest_steps import measured_pool_bytes
from tvr.core.llama import LlamaForCausalLM
from tvr.core.memory import (
    CPU_POOL_SEQUENCES,
    DeviceMemory,
    Limits,
    cpu_pool_bytes,
    cuda_budget,
    note_memory,
    size_pool,
    step_limits,
)
from tvr.core.ops import OpTable
from tvr.core.plugin_config import PluginConfig, find_config
from tvr.core.plugins import BackendManager
from tvr.core.profile import warm_up
from tvr.core.runner import ModelRunner, on_device
from tvr.core.sampler import SamplerState
from tvr.core.step_graphs import capture_steps
from tvr.core.step_ops import StepOps
from tvr.core.tokenizer import Tokenizer
from tvr.core.weights import Progress, dummy_weights
from tvr.errors import BackendUnavailable, CapacityError, ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What `load_engine` built.

    Attributes:
        eager_reasons: why steps, or parts of them, are launched op by op; empty: nothing is.
        left_out: what there was is left out of garbage collections, until the engine is closed.
        load_seconds: how long loading took.
    """

    model_config: ModelConfig
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    ops: OpTable
    runner: ModelRunner
    limits: Limits
    device: DeviceFacts
    dtype: str
    load_seconds: float
    eager_reasons: tuple[str, ...] = ()
    left_out: bool = False


def device_facts(device: str) -> DeviceFacts:
    """Return the facts of "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: not a device name, or no such device.
        BackendUnavailable: a CUDA device is asked for and torch sees none.
    """
    cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device == "cpu":
        return DeviceFacts(type="cpu", name="CPU")
    kind, colon, number = device.partition(":")
    if kind != "cuda" or bool(colon) != number.isdecimal():
        raise ConfigError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:N")
    if not cuda:
        raise BackendUnavailable(
            f"device {device!r} was asked for, and torch {torch.__version__} sees no CUDA device; "
            "use --device cpu"
        )
    index = int(number) if number else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r} was asked for; this machine has {torch.cuda.device_count()} "
            "CUDA device(s), numbered from 0"
        )
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    return DeviceFacts(type="cuda", index=index, sm=major * 10 + minor, name=name)


def resolve_dtype(config: EngineConfig, model: ModelConfig, device_type: str) -> str:
    """Return the dtype that "auto" stands for, or the one asked for."""
    if config.dtype != "auto":
        return config.dtype
    # Half precision on a CPU is slower and less exact, so it is taken only when asked for.
    return "float32" if device_type == "cpu" else model.dtype


def load_backends(
    config: EngineConfig,
    device: DeviceFacts,
    plugins: str | PathLike[str] | Iterable[object] | None,
) -> tuple[BackendManager, OpTable]:
    """Return the backends for `plugins` (see `LLM`), and a table with `config.backend` first.

    Raises:
        PluginError: the plug-in configuration is at fault or, if strict, an installed plugin.
        BackendUnavailable: `config.backend` cannot run here.
    """
    named: str | None = None
    given: tuple[object, ...] = ()
    if isinstance(plugins, (str, PathLike)):
        named = str(plugins)
    elif isinstance(plugins, Iterable):
        given = tuple(plugins)
    elif plugins is not None:
        raise ConfigError(
            f"plugins is {plugins!r}; it must be the path of a plugins.toml or a list of plugin "
            "objects"
        )
    path = find_config(named, {})
    manager = BackendManager(PluginConfig.load(path), plugins=given, device=device)
    if config.strict:
        manager.refuse_broken()
    table = OpTable(
        manager,
        device,
        strict=config.strict,
        backend=config.backend,
        watcher=config.shadow,
        graphs=device.type == "cuda" and not unwanted(config),
    )
    return manager, table


@contextmanager
def _one_line_when_out_of_memory(device: DeviceFacts) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())
        raise CapacityError(
            f"{device} has not enough free memory for the model and its largest steps; lower "
            f"max_num_batched_tokens or max_num_seqs, or make room ({reason})"
        ) from error


def load_engine(
    model: str | PathLike[str],
    config: EngineConfig,
    plugins: str | PathLike[str] | Iterable[object] | None = None,
    progress: Progress | None = None,
) -> EngineParts:
    """Load a checkpoint and size the engine. Cheap checks come before memory is taken.

    `progress` is called as weights are read, as in `tvr.core.weights`.

    Raises:
        ConfigError, CheckpointError, CapacityError, BackendUnavailable, UnsupportedSpec.
    """
    began = time.perf_counter()
    if not isinstance(model, (str, PathLike)):
        raise ConfigError(f"model is {model!r}; it must be the path of a checkpoint")
    checkpoint = open_checkpoint(resolve_model(model), config.load_format)
    model_config = checkpoint.config
    device = device_facts(config.device)
    dtype = resolve_dtype(config, model_config, device.type)
    dummy = config.load_format == "dummy"
    tokenizer = checkpoint.tokenizer()
    _, ops = load_backends(config, device, plugins)
    where = torch.device(str(device))
    before = DeviceMemory.of(where) if device.type == "cuda" else None
    seqs, tokens = step_limits(config, device.type, None if before is None else before.total)
    if before is not None:
        memory, contexts = cuda_budget(config, before), seqs
    else:
        memory, contexts = cpu_pool_bytes(config, model_config, dtype), CPU_POOL_SEQUENCES
    num_blocks, context = size_pool(
        config, model_config, dtype=dtype, pool_bytes=memory, contexts=contexts
    )
    with on_device(where, ops.stream), _one_line_when_out_of_memory(device):
        if dummy:
            weights = dummy_weights(model_config, dtype=dtype, device=where, seed=config.seed)
        else:
            weights = checkpoint.load_weights(dtype=dtype, device=where, progress=progress)
        llama = LlamaForCausalLM(
            model_config,
            weights,
            ops,
            block_size=config.block_size,
            batch_invariant=config.batch_invariant,
            max_position=context,
        )
        del weights  # a backend that packs has its own; the unpacked ones must not count
        bounds = Bounds(
            max_num_seqs=seqs,
            max_num_tokens=tokens,
            max_seq_len=context,
            max_q_len=min(tokens, context),
        )
        step_ops = StepOps.bind(
            ops,
            dtype=dtype,
            block_size=config.block_size,
            vocab_size=model_config.vocab_size,
            batch_invariant=config.batch_invariant,
        )
        room = padded(bounds) if device.type == "cuda" else bounds
        ops.allocate(room)
        eager_reasons = ["the device is no GPU"]
        if device.type == "cuda":
            eager_reasons = obstacles(config, ops)
        with_graphs = not eager_reasons
        if before is not None and config.num_blocks is None:
            memory = measured_pool_bytes(
                config, before, llama, ops, step_ops, bounds, where, with_graphs=with_graphs
            )
            num_blocks, context = size_pool(
                config, model_config, dtype=dtype, pool_bytes=memory, contexts=contexts
            )
        kv_cache = KVCache.allocate(
            model_config, num_blocks, config.block_size, dtype=dtype, device=where
        )
        tables = DeviceTables(
            num_rows=seqs, max_model_len=context, block_size=config.block_size, device=where
        )
        eos_ids = set(model_config.eos_token_ids)
        if tokenizer is not None:
            # A tokenizer may know more ids than the model has logits.
            eos_ids |= {i for i in tokenizer.eos_token_ids if i < model_config.vocab_size}
        sampler = SamplerState(seqs, model_config.vocab_size, where, eos_token_ids=eos_ids)
        ops.start(room)
        runner = ModelRunner(llama, ops, step_ops, kv_cache, tables, sampler)
        sized = replace(bounds, max_seq_len=context, max_q_len=min(bounds.max_q_len, context))
        if with_graphs:
            eager_reasons = partial_obstacles(ops)
            capture = CudaCapture(ops.stream)
            runner.graphs = capture_steps(
                llama, ops, step_ops, kv_cache, tables, sampler, sized, capture
            )
        if before is not None:
            warm_up(runner, sized, config.block_size, num_blocks)
            runner.counts.clear()
            note_memory(config, before, DeviceMemory.of(where))
    left_out = device.type == "cuda" and frozen_objects().freeze()
    return EngineParts(
        model_config=model_config,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(eos_ids),
        ops=ops,
        runner=runner,
        limits=Limits(
            max_model_len=context,
            block_size=config.block_size,
            num_blocks=num_blocks,
            block_bytes=model_config.kv_bytes_per_block(config.block_size, dtype),
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
        ),
        device=device,
        dtype=dtype,
        eager_reasons=tuple(eager_reasons),
        left_out=left_out,
        load_seconds=time.perf_counter() - began,
    )
