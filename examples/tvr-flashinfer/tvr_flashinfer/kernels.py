"""FlashInfer's kernels that this backend uses, and a way to compile them beforehand.

FlashInfer compiles a kernel when it is first asked for and keeps it in its cache
(`FLASHINFER_WORKSPACE_BASE`, the home folder by default). Both attention ops use one and the same
module, the FA2 kernel for prefill, of which there is one for each dtype and head size:

    python -m tvr_flashinfer.kernels                                # all: six modules, and the norm
    python -m tvr_flashinfer.kernels --dtype bfloat16 --head-dim 128
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import TYPE_CHECKING

import torch

from tvr_flashinfer import ATTENTION

if TYPE_CHECKING:
    from flashinfer.jit import JitSpec


def attention_kernel(dtype: str, head_dim: int) -> JitSpec:
    """Return the module that serves both attention ops, not yet compiled."""
    from flashinfer.jit import gen_batch_prefill_module

    torch_dtype = getattr(torch, dtype)
    return gen_batch_prefill_module(
        "fa2",
        torch_dtype,  # of q
        torch_dtype,  # of the cache
        torch_dtype,  # of the output
        torch.int32,  # of the indices
        head_dim,  # of q and k
        head_dim,  # of v
        0,  # positions: none, the model has applied its RoPE
        False,  # a sliding window
        False,  # a soft cap
        False,  # sums of q k^T in fp16
    )


@functools.cache  # each load asks ninja anew whether all is compiled
def require_attention_kernel(dtype: str, head_dim: int) -> None:
    """Compile the module if need be, and load it, once a process."""
    attention_kernel(dtype, head_dim).build_and_load()


def main() -> None:
    """Compile all kernels in one go, as many files at once as there are cores."""
    from flashinfer.jit import build_jit_specs
    from flashinfer.jit.norm import gen_norm_module

    parser = argparse.ArgumentParser(description="Compile the kernels that tvr-flashinfer uses.")
    parser.add_argument("--dtype", nargs="+", choices=ATTENTION.dtypes, default=ATTENTION.dtypes)
    parser.add_argument(
        "--head-dim", nargs="+", type=int, choices=ATTENTION.head_dims, default=ATTENTION.head_dims
    )
    options = parser.parse_args()
    began = time.perf_counter()
    specs = [attention_kernel(d, n) for d in options.dtype for n in options.head_dim]
    build_jit_specs([*specs, gen_norm_module()])
    print(f"{len(specs) + 1} modules are compiled, in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
