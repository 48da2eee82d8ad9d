"""A tvr backend that serves `rope` and nothing else, in torch. `calls` counts its runs."""

import torch

from tvr.contract import BackendInfo, BoundOp, Box, why_not
from tvr.hookspecs import hookimpl

BOX = Box(dtypes=("float32", "float16", "bfloat16"), devices=("cpu", "cuda"))
INFO = BackendInfo(name="only_rope", abi=(1, 0), ops={"rope": [BOX]})

calls = 0


@hookimpl
def tvr_backend_info():
    return INFO


@hookimpl
def tvr_bind_rope(spec, device):
    return None if why_not(INFO, spec, device) else BoundOp(run=rope)


def rope(q, k, positions, cos_sin_cache, *, q_out, k_out):
    """Rotate q [T, H, D] and k [T, KVH, D] in fp32 and round once; outputs may be the inputs."""
    global calls
    calls += 1
    if positions.dtype != torch.int64:
        raise TypeError(f"positions are {positions.dtype}; they must be int64")
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2] each
    for x, out in ((q, q_out), (k, k_out)):
        first, second = x.float().chunk(2, dim=-1)  # [T, heads, D / 2] each
        rotated = (first * cos - second * sin, second * cos + first * sin)
        out.copy_(torch.cat(rotated, dim=-1))
    return q_out, k_out
