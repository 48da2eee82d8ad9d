// Attention of one new token a sequence over the paged KV cache in one pass: a block takes all keys
// of a sequence and a bundle of query heads. Needs no plan; fast where sequences are many or short.
//
// Grid: (bundles of a KV head, num_kv_heads, num_seqs), so at most 65,535 sequences.
// Block: 32 * WARPS threads.
// Shared memory: decode_shape.py computes it; rings, then WARPS states of a bundle.
// Required: -DDTYPE=bf16|fp16|fp32 -DHEAD_DIM=64|80|96|128|256 -DWARPS=1..4 -DSTAGES>=2
//   -DGROUP_TILES=1|2 -DCTAS>=1. SMs: 80 and up.
// Numerics: scores, softmax, sums and O in fp32; the weights are rounded to DTYPE for tensor cores.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16 -DHEAD_DIM=64
//   -DWARPS=4 -DSTAGES=6 -DGROUP_TILES=1 -DCTAS=2 paged_attention.cu
// Source: Kwon et al., PagedAttention (2023); Milakov and Gimelshein (2018) for the online softmax.
#include "decode.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) KERNEL_NAME(paged_attention)(
    const scalar_t* __restrict__ q,        // [num_seqs, num_heads, HEAD_DIM]
    const scalar_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const scalar_t* __restrict__ v_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const int* __restrict__ block_table,   // [num_seqs, max_blocks]
    const int* __restrict__ seq_lens,      // [num_seqs]
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
  const Outputs outputs = {out, lse, num_heads};
  const int seq = blockIdx.z;
  const int seq_len = seq_lens[seq];
  if (seq_len == 0) {
    if (blockIdx.x == 0 && blockIdx.y == 0) write_empty(outputs, seq);
    return;
  }
  Segment all;
  all.seq = seq;
  all.kv_head = blockIdx.y;
  all.part = blockIdx.x;
  all.first_tile = 0;
  all.num_tiles = (seq_len + TILE - 1) / TILE;
  all.seq_len = seq_len;
  all.slot = all.first_slot = 0;
  all.num_partials = 1;
  decode(in, Work{all, nullptr, 0}, Partials{}, outputs, Shared(memory, min(HEADS, group_size)));
}
