"""How many KV blocks an engine gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tvr.core.config import ModelConfig
from tvr.core.engine_config import EngineConfig
from tvr.core.host_memory import GIB, available_cpu_bytes, shown_bytes
from tvr.errors import CapacityError, ConfigError

_LOG = logging.getLogger(__name__)

# CPU memory is shared with everything else on the machine, so the pool is modest: room for a few
# full contexts, never more than this.
CPU_POOL_BYTES = 1 * GIB
CPU_POOL_SEQUENCES = 4

#: Most tokens of a step, unless asked otherwise.
CPU_STEP_TOKENS, SMALL_GPU_STEP_TOKENS, GPU_STEP_TOKENS = 2048, 8192, 16384
LARGE_GPU_BYTES = 60 * GIB


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The engine's sizes, all resolved.

    Attributes:
        max_model_len: tokens of the longest sequence.
        block_size, num_blocks: the KV pool.
        block_bytes: bytes of one block over all layers, K and V.
        max_num_seqs, max_num_batched_tokens: the largest step.
    """

    max_model_len: int
    block_size: int
    num_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        size = shown_bytes(self.num_blocks * self.block_bytes)
        return (
            f"KV pool {size}: {self.num_blocks} blocks of {self.block_size} = {tokens} "
            f"tokens; context {self.max_model_len}, at most {self.max_num_seqs} sequences and "
            f"{self.max_num_batched_tokens} tokens a step"
        )


def step_limits(
    config: EngineConfig, device_type: str, device_bytes: int | None = None
) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens), defaults filled in.

    On a GPU prompts come in few large steps: what attention has cached before is read by slower
    paths than what is new. Whoever answers others meanwhile may want smaller ones. A small GPU gets
    them too, as activations would take too much of its KV pool.

    Args:
        config: what was asked for.
        device_type: "cuda" or "cpu".
        device_bytes: memory of a GPU; None: not known, and enough.

    Raises:
        ConfigError: a step would be too small for one token of each sequence.
    """
    default = CPU_STEP_TOKENS
    if device_type == "cuda":
        is_small = device_bytes is not None and device_bytes < LARGE_GPU_BYTES
        default = SMALL_GPU_STEP_TOKENS if is_small else GPU_STEP_TOKENS
    tokens = config.max_num_batched_tokens or default
    seqs = config.max_num_seqs or min(tokens, 256 if device_type == "cuda" else 32)
    if seqs > tokens:
        raise ConfigError(
            f"max_num_seqs is {seqs} and max_num_batched_tokens {tokens}; a step must hold one "
            "token of each sequence, so raise the latter or lower the former"
        )
    return seqs, tokens


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Return the asked-for context, or the model's own.

    Raises:
        ConfigError: more is asked for than the model has positions for.
    """
    asked = config.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {asked}; the model has {model.max_position_embeddings} positions "
            "(max_position_embeddings in config.json)"
        )
    return asked or model.max_position_embeddings


def size_pool(
    config: EngineConfig, model: ModelConfig, *, dtype: str, pool_bytes: int, contexts: int
) -> tuple[int, int]:
    """Return (num_blocks, max_model_len) for a pool of at most `pool_bytes`.

    Args:
        config: `num_blocks` and `max_model_len`, where given, are kept or refused, not changed.
        model: its block size in bytes and context.
        dtype: of the cache.
        pool_bytes: memory there is for the pool.
        contexts: full contexts worth having; more blocks than that are not taken.

    Raises:
        CapacityError: what was asked for does not fit.
    """
    context = context_limit(config, model)
    block_bytes = model.kv_bytes_per_block(config.block_size, dtype)
    needed = -(-context // config.block_size)
    if config.num_blocks is not None:
        fits, where = config.num_blocks, f"num_blocks is {config.num_blocks}"
    else:
        fits = min(pool_bytes // block_bytes, contexts * needed)
        where = f"{shown_bytes(max(pool_bytes, 0))} are left for the KV pool"
    if fits < needed and config.max_model_len is None and fits * config.block_size >= 2:
        context = fits * config.block_size
        needed = fits
    if fits < needed:
        raise CapacityError(
            f"a context of {context} tokens needs {needed} KV blocks of {block_bytes} bytes "
            f"({shown_bytes(needed * block_bytes)}); {where}; lower max_model_len or block_size, "
            "or make room"
        )
    return fits, context


def cpu_pool_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    """Return the bytes a CPU pool may take: modest, but one asked-for context at least.

    Raises:
        CapacityError: a pool of `num_blocks` takes more memory than there is. The system would
            grant it, and end the process once it fills.
    """
    available = available_cpu_bytes()
    if config.num_blocks is not None:
        asked = config.num_blocks * model.kv_bytes_per_block(config.block_size, dtype)
        if asked > available:
            raise CapacityError(
                f"a KV cache of {config.num_blocks} blocks of {config.block_size} tokens takes "
                f"{shown_bytes(asked)}, and {shown_bytes(available)} of memory are free; ask for "
                "fewer or shorter requests at once, or lower num_blocks"
            )
    free = int(available * config.memory_fraction)
    pool = CPU_POOL_BYTES
    if config.max_model_len is not None:
        blocks = -(-config.max_model_len // config.block_size)
        pool = max(pool, blocks * model.kv_bytes_per_block(config.block_size, dtype))
    return min(pool, free)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """A CUDA device's memory at one moment, in bytes.

    Attributes:
        total, free: of the device, as the driver sees it.
        reserved: what torch holds in this process.
        allocated: what of this tensors take.
    """

    total: int
    free: int
    reserved: int
    allocated: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory:
        """Return the device's memory after torch has given back what no tensor takes."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(device),
            allocated=torch.cuda.memory_allocated(device),
        )

    @property
    def taken(self) -> int:
        """What is not free, whoever has it."""
        return self.total - self.free

    @property
    def outside_torch(self) -> int:
        """What other processes have, and the driver's contexts, modules and libraries."""
        return self.taken - self.reserved


def cuda_budget(config: EngineConfig, before: DeviceMemory) -> int:
    """Return the bytes an engine may take: `memory_fraction` of the device, if that is free.

    Args:
        config: for `memory_fraction`.
        before: the memory before the engine took any.
    """
    # Other processes grow, and torch's memory fragments; so not to the last byte.
    return min(int(before.total * config.memory_fraction), before.free - before.total // 20)


def cuda_pool_bytes(
    config: EngineConfig,
    before: DeviceMemory,
    after: DeviceMemory,
    peak_bytes: int,
    graph_bytes: int = 0,
) -> int:
    """Return the bytes of an engine's budget that are left for its KV pool.

    The pool is the last large thing to be allocated, and graphs are captured on it: they know its
    addresses. So all that the engine has besides is counted before, by running its largest steps on
    a small pool (`tvr.core.profile.LargestSteps`):

    - weights, as the backends packed them, and workspaces: allocated by then;
    - activations and logits of the largest steps, tables by row, sampling state, and the inputs
      and logits of CUDA graphs: in the peak, since all of them are there when it is measured;
    - libraries, modules and contexts of the driver: from what is taken outside of torch;
    - CUDA graphs and the memory that ops allocate in them: `graph_bytes`, measured on a few that
      are captured and not kept.

    What torch's allocator holds in freed pieces is not counted. It gives that back where memory
    runs out, which is what the part of the device that no engine takes is for.

    Args:
        config: for `memory_fraction`.
        before, after: the memory before the weights were loaded, and after the largest steps ran
            and before any graph was captured.
        peak_bytes: most bytes that tensors took meanwhile, but for the pool of those steps.
        graph_bytes: what CUDA graphs will take.
    """
    own = peak_bytes - before.allocated
    libraries = max(0, after.outside_torch - before.outside_torch)
    return cuda_budget(config, before) - own - libraries - graph_bytes


def note_memory(config: EngineConfig, before: DeviceMemory, after: DeviceMemory) -> None:
    """Tell the logger what an engine that is loaded takes of its budget."""
    taken, budget = after.taken - before.taken, cuda_budget(config, before)
    _LOG.info("the engine takes %s of %s", shown_bytes(taken), shown_bytes(budget))
