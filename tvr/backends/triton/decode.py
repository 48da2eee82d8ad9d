"""Attention of one new token a sequence over the paged cache: flash decoding."""

from __future__ import annotations

import math
from dataclasses import replace

import triton
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.decode_kernels import SLICE, split_kernel
from tvr.backends.triton.decode_plan import PLAN_BLOCK, decode_plan_kernel
from tvr.backends.triton.decode_workspace import Layout, num_parts, num_rows_of, split_rule
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import AttentionDecodeSpec, BoundOp, Bounds, StepMeta

#: To merge a pair's partial results takes about as long as to read so many tiles.
_SOLO_TILES = 8

#: Shares grow by so small a part for pairs to be cut evenly.
_EVEN_ABOVE = 32

#: Of a multiprocessor.
_REGISTERS = 65536


def bind_attention_decode(spec: AttentionDecodeSpec, gpu: Gpu) -> BoundOp:
    """Bind the plan, which is made once a step, and the kernel of each layer."""
    decode = _Decode(spec, gpu)
    return BoundOp(
        run=decode.run,
        plan=decode.plan,
        workspace_bytes=decode.workspace_bytes,
        attach=decode.attach,
    )


class _Decode:
    """`decode_plan_kernel` once a step, `split_kernel` in each layer."""

    def __init__(self, spec: AttentionDecodeSpec, gpu: Gpu) -> None:
        config = _config(spec, gpu)
        programs = config.blocks["PROGRAMS"]
        self._num_programs = gpu.num_sms * programs
        self._even_above = _EVEN_ABOVE
        self._spec = spec
        self._tile = SLICE * config.num_warps
        self._rule = split_rule(spec, self._tile)
        self._num_bundles = spec.num_kv_heads * num_parts(spec)
        self._layouts: dict[int, Layout] = {}  # by their bytes: `attach` is not told the bounds
        self._parts: dict[str, Tensor] = {}
        shape = {"TILE": self._tile, "FIXED": self._rule.fixed}
        self._plan = Kernel(
            gpu, decode_plan_kernel, Config(num_warps=PLAN_BLOCK // 32), **shape, BLOCK=PLAN_BLOCK
        )
        self._split = Kernel(
            gpu,
            split_kernel,
            replace(config, blocks=shape),
            HEAD_DIM=spec.head_dim,
            SLICES=config.num_warps,
            # Else the compiler takes so many that not all programs are there at once.
            max_registers=min(255, _REGISTERS // (programs * 32 * config.num_warps) // 8 * 8),
            ROWS=num_rows_of(spec),
        )

    def workspace_bytes(self, bounds: Bounds) -> int:
        """Return the bytes of the workspace for steps within `bounds`."""
        layout = Layout(self._spec, self._tile, self._num_programs, bounds)
        self._layouts[layout.num_bytes] = layout
        return layout.num_bytes

    def attach(self, workspace: Tensor) -> None:
        """Take a workspace [n] uint8, n being an answer of `workspace_bytes`."""
        self._parts = self._layouts[len(workspace)].parts(workspace)

    def plan(self, step: StepMeta) -> None:
        """Cut the step's keys into shares; reads the lengths on the device only."""
        if step.num_seqs == 0:
            return
        self._plan(
            (1,),
            step.seq_lens,
            self._parts["starts"],
            self._parts["leads"],
            self._parts["share_and_total"],
            self._parts["counters"],
            step.num_seqs,
            self._num_bundles,
            self._num_programs,
            step.num_seqs.bit_length(),
            self._rule.max_splits,
            self._rule.min_split_tiles,
            _SOLO_TILES,
            self._even_above,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor:
        """q, out [S, H, D]; lse [S, H] fp32. The step is the one that was planned."""
        if step.num_seqs == 0:
            return out
        spec, parts = self._spec, self._parts
        self._split(
            (self._num_programs,),
            q,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            parts["starts"],
            parts["leads"],
            parts["share_and_total"],
            parts["counters"],
            parts["partial_o"],
            parts["partial_mass"],
            out,
            lse,
            scale * math.log2(math.e),
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            step.block_table.stride(0),
            step.num_seqs,
            self._num_programs,
            spec.num_heads,
            self._num_bundles,
            num_parts(spec),
            spec.group_size,
            spec.block_size.bit_length() - 1,
            self._rule.max_splits,
            self._rule.min_split_tiles,
        )
        return out


def _config(spec: AttentionDecodeSpec, gpu: Gpu) -> Config:
    """Return how the split kernel is compiled; PROGRAMS of it are on a multiprocessor."""
    width = triton.next_power_of_2(spec.head_dim)
    if gpu.sm == 0:
        # The interpreter: small tiles, so that its short sequences have several and are cut.
        default = Config(2, 1, {"PROGRAMS": 1})
    elif spec.dtype == "float32":
        # Without matrix units there are too few registers for loads that run ahead.
        default = Config(4 if width <= 128 else 2, 1, {"PROGRAMS": 2})
    else:
        # Two programs, for more of them spill registers; at most 64 KiB of shared memory each.
        default = Config(4, 3 if width <= 128 else 2, {"PROGRAMS": 2})
    return tuned("attention_decode", gpu.sm, default, dtype=spec.dtype, head_dim=spec.head_dim)
