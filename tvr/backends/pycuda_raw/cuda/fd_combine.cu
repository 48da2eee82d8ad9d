// Second pass of flash decoding with fixed splits: merges the partial results of each sequence and
// bundle of query heads, always in the same order, and normalises once.
//
// Grid: (bundles of a KV head, num_kv_heads, num_seqs), so at most 65,535 sequences.
// Block: 32 * WARPS threads.
// Shared memory: decode_shape.py computes it; WARPS states of a bundle.
// Required: as fd_split. SMs: 80 and up. Numerics: all fp32; the result is rounded once.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16 -DHEAD_DIM=64
//   -DWARPS=4 -DSTAGES=6 -DGROUP_TILES=1 -DCTAS=2 fd_combine.cu
// Source: Dao et al., Flash-Decoding (2023).
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL_NAME(fd_combine)(
    const int* __restrict__ first_splits,  // [num_seqs + 1] splits of a head of those before
    float* partial_o,                      // [slots, bundle_size, HEAD_DIM]
    float* partial_scales,                 // [slots, bundle_size, 2]
    scalar_t* out,                         // [num_seqs, num_heads, HEAD_DIM]
    float* lse,                            // [num_seqs, num_heads]; may be null
    int num_heads, int group_size) {
  DYNAMIC_SHARED(memory);
  const int part = blockIdx.x, kv_head = blockIdx.y, seq = blockIdx.z;
  const int before = first_splits[seq], num_splits = first_splits[seq + 1] - before;
  if (num_splits < 2) return;  // fd_split wrote the result itself
  const int bundle_size = min(HEADS, group_size);
  const States states = {reinterpret_cast<float*>(memory),
                         reinterpret_cast<Scale*>(memory) + WARPS * bundle_size * STATE_ROW / 2,
                         bundle_size};
  const Partials partials = {partial_o, reinterpret_cast<Scale*>(partial_scales), nullptr,
                             bundle_size};
  const Bundle heads = bundle_of(kv_head, part, group_size);
  const int num_parts = gridDim.x, num_bundles = num_parts * gridDim.y;
  const int bundle = kv_head * num_parts + part;
  const int first_slot = before * num_bundles + bundle * num_splits;
  read_partials<fixed_slot>(partials, states, first_slot, num_splits, heads.num_heads);
  __syncthreads();
  write_result(states, Outputs{out, lse, num_heads}, seq, heads.first_head, heads.num_heads);
}
