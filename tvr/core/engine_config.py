"""EngineConfig: how an engine is built. All checks of it are here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tvr.core.policy import SchedulingPolicy
from tvr.core.policy_guard import check_policy
from tvr.core.watcher import Watcher
from tvr.errors import ConfigError

DTYPE_NAMES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of one engine; None means: chosen at start-up from model and device.

    Attributes:
        backend: backend put first, or "auto" for the configured order.
        strict: refuse to serve an op from any other backend than `backend`, and to start beside
            an installed plugin that is broken.
        dtype: activation and weight dtype; "auto": the checkpoint's, float32 on CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: most tokens of one sequence, prompt and output together.
        block_size: tokens in a KV block, a power of two.
        num_blocks: KV blocks in the pool.
        memory_fraction: share of the device's memory that this engine may take, whatever other
            engines and processes have; on a CPU, of the memory that is available.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; by default 16,384 on a GPU, 8,192 on one of
            less than 60 GiB, 2,048 on a CPU.
        enable_prefix_caching: reuse the KV blocks of equal prompt beginnings.
        batch_invariant: results must not depend on neighbours, bit for bit.
        load_format: "safetensors" and "gguf" read a checkpoint of that format, "auto" the one
            that is there; "dummy" draws seeded weights.
        seed: of unseeded requests and of dummy weights.
        max_lag: steps the scheduler runs ahead of the device, 0 or 1.
        enforce_eager: launch every step op by op, none as a CUDA graph.
        scheduling_policy: who goes first and who gives way; None: first come, first served.
        shadow: repeats every op on a reference, a `tvr.conformance.shadow.Shadow`; None: nobody.
            With it the scheduler does not run ahead, whatever `max_lag` says. Any other
            `tvr.core.watcher.Watcher` sees the ops' calls, too.
    """

    backend: str = "auto"
    strict: bool = False
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float = 0.9
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    batch_invariant: bool = False
    load_format: str = "auto"
    seed: int = 0
    max_lag: int = 1
    enforce_eager: bool = False
    scheduling_policy: SchedulingPolicy | None = None
    shadow: Watcher | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            whole = f.type in ("int", "int | None")
            if whole and not (value is None and "None" in f.type) and type(value) is not int:
                raise ConfigError(f"{f.name} is {value!r}; it must be a whole number")
            if f.type == "bool" and type(value) is not bool:
                raise ConfigError(f"{f.name} is {value!r}; it must be True or False")
            if f.type == "str" and not isinstance(value, str):
                raise ConfigError(f"{f.name} is {value!r}; it must be a string")
        if self.dtype not in DTYPE_NAMES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not known; use auto, float32, float16 or bfloat16"
            )
        object.__setattr__(self, "dtype", DTYPE_NAMES[self.dtype])
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("max_lag", self.max_lag, (0, 1))
        if self.scheduling_policy is not None:
            check_policy("scheduling_policy", self.scheduling_policy)
        if self.shadow is not None:
            if isinstance(self.shadow, type) or not isinstance(self.shadow, Watcher):
                raise ConfigError(
                    f"shadow is {self.shadow!r}; give a tvr.conformance.shadow.Shadow"
                )
            if self.shadow.one_at_a_time:
                object.__setattr__(self, "max_lag", 0)
        for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; it must be at least 2, one token of "
                "prompt and one new one"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size is {self.block_size}; it must be a power of two")
        if not isinstance(self.memory_fraction, (int, float)) or not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"memory_fraction is {self.memory_fraction!r}; it must be above 0 and at most 1"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must fit in 64 signed bits")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(map(str, allowed))
        raise ConfigError(f"{name} is {value!r}; it must be {choices}")
