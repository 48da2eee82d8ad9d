// Flash decoding over the paged KV cache: every block works off its share of all sequences' keys,
// as fd_plan has cut them, with one online softmax for all query heads of a KV head.
//
// Grid: blocks of the plan (multiprocessors * CTAS). Block: 32 * WARPS threads.
// Shared memory: decode_shape.py computes it; rings, then WARPS states of a bundle.
// Required: -DDTYPE=bf16|fp16|fp32 -DHEAD_DIM=64|80|96|128|256 -DWARPS=1..4 -DSTAGES>=2
//   -DGROUP_TILES=1|2 -DCTAS>=1. SMs: 80 and up.
// Numerics: scores, softmax, sums and O in fp32; the weights are rounded to DTYPE for tensor cores.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16 -DHEAD_DIM=64
//   -DWARPS=4 -DSTAGES=6 -DGROUP_TILES=1 -DCTAS=2 fd_split.cu
// Source: Dao et al., Flash-Decoding (2023), for the split; balanced runs of tiles are the
//   "stream-K" of Osama et al. (2023), there for matrix products.
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL_NAME(fd_split)(
    const scalar_t* __restrict__ q,        // [num_seqs, num_heads, HEAD_DIM]
    const scalar_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const scalar_t* __restrict__ v_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const int* __restrict__ block_table,   // [num_seqs, max_blocks]
    const BlockWork* __restrict__ blocks,  // [gridDim.x]
    const Segment* __restrict__ segments,  // [list of the plan]
    const int* __restrict__ empty_seqs,    // [num_seqs]
    int* counters,                         // [slots]; null: fd_combine merges the partials
    float* partial_o,                      // [slots, bundle_size, HEAD_DIM]
    float* partial_scales,                 // [slots, bundle_size, 2]
    scalar_t* out,                         // [num_seqs, num_heads, HEAD_DIM]
    float* lse,                            // [num_seqs, num_heads]; may be null
    int64_t q_seq_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride,
    int64_t table_stride, float scale_log2, int num_heads, int group_size, int block_shift,
    int aligned) {
  DYNAMIC_SHARED(memory);
  const Inputs in = {q,
                     k_cache,
                     v_cache,
                     block_table,
                     q_seq_stride,
                     q_head_stride,
                     k_block_stride,
                     v_block_stride,
                     table_stride,
                     scale_log2,
                     group_size,
                     block_shift,
                     aligned};
  const int bundle_size = min(HEADS, group_size);
  const Partials partials = {partial_o, reinterpret_cast<Scale*>(partial_scales), counters,
                             bundle_size};
  const Outputs outputs = {out, lse, num_heads};
  const BlockWork mine = load_record(blocks + blockIdx.x);
  // The length is asked for as well so that it is loaded with the rest, and not behind the branch.
  if (min(mine.lead.num_tiles, mine.lead.seq_len) > 0) {
    const Work work = {mine.lead, segments + mine.first_rest, mine.num_rest};
    decode(in, work, partials, outputs, Shared(memory, bundle_size));
  }
  for (int i = 0; i < mine.num_empty; ++i) {
    write_empty(outputs, empty_seqs[mine.first_empty + i]);
  }
}
