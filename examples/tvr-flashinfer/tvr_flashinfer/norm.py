"""RMSNorm by FlashInfer's CUDA kernel.

Of its two implementations this is the one that is compiled by nvcc. The other, in CuTe-DSL, needs
nvidia-cutlass-dsl and compiles a kernel for each hidden size.

FlashInfer's `fused_add_rmsnorm` is not served as `add_rms_norm`: it norms the sum of the two in
fp32, and the contract has that sum rounded first, as transformers does. tvr adds, and calls this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from flashinfer.norm import get_norm_module
from flashinfer.utils import device_support_pdl

from tvr.contract import BoundOp, DeviceFacts

if TYPE_CHECKING:
    from torch import Tensor


def bind_rms_norm(device: DeviceFacts) -> BoundOp:
    """Return `rms_norm`, compiled and loaded."""
    kernel = get_norm_module().rmsnorm
    # On Hopper and later a kernel may be launched before the one in front of it has ended.
    early_launch = device_support_pdl(torch.device(str(device)))

    def run(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor:
        """x, out [..., hidden]; weight [hidden]."""
        if x.numel():  # an empty grid is an error in CUDA
            hidden = x.shape[-1]
            rows, out_rows = x.reshape(-1, hidden), out.view(-1, hidden)
            kernel(out_rows, rows, weight, eps, early_launch)
        return out

    return BoundOp(run=run)
