"""What each idea of the decode kernels brings: `python benchmarks/decode_ladder.py [OUT.json]`.

Needs an NVIDIA GPU and the `pycuda` extra. Every rung is held against the first before it is timed:
in a CUDA graph of 20 launches over caches that the L2 does not hold, the median of 25 replays.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tvr.backends.pycuda_raw import decode_shape
from tvr.backends.pycuda_raw.decode import bind_attention_decode
from tvr.backends.pycuda_raw.device import CudaGpu, open_gpu
from tvr.conformance import tolerance
from tvr.contract import AttentionDecodeSpec, Bounds, StepMeta

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 64, 16
GROUP = NUM_HEADS // NUM_KV_HEADS
CELLS = [(1, 1024), (1, 8192), (8, 8192), (64, 4096)]
LAUNCHES, REPLAYS = 20, 25
ALONE = "a block for each query head, whole sequences"
SCALE = HEAD_DIM**-0.5

Run = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def main() -> int:
    """Print the ladder and write it down."""
    gpu = open_gpu(0)
    rows = []
    with torch.cuda.stream(gpu.stream):
        for batch, ctx in CELLS:
            rows += measure_cell(gpu, batch, ctx)
            torch.cuda.empty_cache()
    header = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "dtype": "bfloat16",
        "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "block_size": BLOCK_SIZE,
    }
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"header": header, "rows": rows}, file, indent=1)
    return 0


def measure_cell(gpu: CudaGpu, batch: int, ctx: int) -> list[dict[str, object]]:
    """Return a row for each rung at one size."""
    torch.manual_seed(0)
    num_blocks = batch * ctx // BLOCK_SIZE
    shape = (2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache_bytes = 2 * num_blocks * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    sets = min(max(2, -(-3 * l2_bytes // cache_bytes)), 1000)
    caches = [torch.randn(shape, device=gpu.name, dtype=torch.bfloat16) for _ in range(sets)]
    q = torch.randn(batch, NUM_HEADS, HEAD_DIM, device=gpu.name, dtype=torch.bfloat16)
    step = StepMeta(
        block_table=torch.randperm(num_blocks, device=gpu.name).int().view(batch, -1),
        seq_lens=torch.full((batch,), ctx, device=gpu.name, dtype=torch.int32),
        cu_seqlens_q=torch.arange(batch + 1, device=gpu.name, dtype=torch.int32),
        num_seqs=batch,
        num_tokens=batch,
        max_q_len=1,
        max_seq_len=ctx,
        seq_lens_cpu=[ctx] * batch,
    )
    rows, first = [], None
    for name, run in rungs(gpu, step):
        out = torch.full_like(q, float("nan"))
        run(q, *caches[0], out)
        if name == ALONE:
            out = by_place_in_group(out).permute(1, 2, 0, 3).reshape(out.shape)
        first = out if first is None else first
        error = (out.float() - first.float()).norm() / first.float().norm()
        limit = 2 * tolerance.frobenius_limit("bfloat16", ctx)
        assert error <= limit, f"{name} is off by {error:.2g} at {batch} x {ctx}"
        us = time_us(gpu, [lambda c=c, run=run, out=out: run(q, *c, out) for c in caches])
        rows.append({"idea": name, "batch": batch, "ctx": ctx, "us": round(us, 2)})
        print(f"{batch:4} x {ctx:6}  {us:8.2f} us  {cache_bytes / us / 1e6:5.2f} TB/s  {name}")
    return rows


def rungs(gpu: CudaGpu, step: StepMeta) -> list[tuple[str, Run]]:
    """Return the ladder: each rung is the one before with one more idea."""
    alone = bound(gpu, step, num_heads=NUM_KV_HEADS, max_splits=1)

    def head_by_head(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for i, part in enumerate(by_place_in_group(out)):
            alone(q[:, i::GROUP], k, v, part)

    return [
        (ALONE, head_by_head),
        ("the query heads of a KV head together", bound(gpu, step, max_splits=1)),
        ("fixed splits, merged by a second kernel", bound(gpu, step, max_splits=16)),
        ("balanced shares, rings of 2 slices", bound(gpu, step, stages=2)),
        ("balanced shares, rings of 4 slices", bound(gpu, step, stages=4)),
        ("balanced shares, rings as deep as fit", bound(gpu, step)),
    ]


def by_place_in_group(out: Tensor) -> Tensor:
    """Return the memory of `out` as [GROUP, S, KVH, D], as the first rung fills it."""
    return out.view(GROUP, len(out), NUM_KV_HEADS, HEAD_DIM)


def bound(
    gpu: CudaGpu,
    step: StepMeta,
    *,
    num_heads: int = NUM_HEADS,
    max_splits: int | None = None,
    stages: int | None = None,
) -> Run:
    """Return decode attention with its plan made; `stages` limits the ring of a warp."""
    spec = AttentionDecodeSpec(
        dtype="bfloat16",
        num_heads=num_heads,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        max_splits=max_splits,
    )
    usual = decode_shape._MAX_STAGES
    decode_shape._MAX_STAGES = stages or usual
    try:
        op = bind_attention_decode(spec, gpu)
    finally:
        decode_shape._MAX_STAGES = usual
    if op.workspace_bytes is not None and op.attach is not None:
        most = Bounds(
            max_num_seqs=step.num_seqs,
            max_num_tokens=step.num_tokens,
            max_seq_len=step.max_seq_len,
            max_q_len=1,
        )
        op.attach(torch.zeros(op.workspace_bytes(most), dtype=torch.uint8, device=gpu.name))
    if op.plan is not None:
        op.plan(step)

    def run(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        op.run(q, k, v, step, scale=SCALE, out=out)

    return run


def time_us(gpu: CudaGpu, launches: list[Callable[[], None]]) -> float:
    """Return the median time of a launch."""
    count = max(LAUNCHES, len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=gpu.stream):
        for i in range(count):
            launches[i % len(launches)]()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
