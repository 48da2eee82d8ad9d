// Causal attention of chunks of new tokens over the paged cache on Hopper: one warpgroup copies
// keys and values, the others multiply; each multiplies one tile while it weighs another.
//
// Grid: num_kv_heads * (num_tokens * group_size / TILE_ROWS + num_seqs) blocks, the KV head first;
//   some find nothing to do and leave. Block: 128 * (NUM_CONSUMERS + 1) threads.
// Dynamic shared memory: (TILE_ROWS + 2 * NUM_STAGES * TILE_KEYS) * HEAD_DIM * 2 + 1024 bytes.
//   For head_dim 64, 128 and 256: 192, 128 and 128 rows; 512, 384 and 384 threads; 91136, 164864
//   and 197632 bytes.
// -DDTYPE=bf16|fp16 -DHEAD_DIM=64|128|256
// SMs: 90 alone (sm_90a). q and the caches start at multiples of 16 bytes, strides of q and of
// blocks are multiples of 8 numbers, scale is above 0: prefill_sm90.py sees to it.
// fp32: scores, softmax, sums and output until it is rounded once. The softmax weights are rounded
// to DTYPE for the second product.
// Alone: nvcc -cubin -arch=sm_90a -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16
//   -DHEAD_DIM=128 prefill_sm90.cu
// Source: Shah et al., "FlashAttention-3" (arXiv 2407.08608): the sharing among warpgroups, the
// overlap of products and softmax; the rescaling that is put off is FlashAttention-4's.
#include "common.cuh"
#include "prefill_sm90_tiles.cuh"
#include "prefill_work.cuh"
#include "wgmma.cuh"

// What a thread has of its warpgroup's 64 rows, spread as wgmma spreads d: rows lane / 4 and 8
// more (`half` 0 and 1) of its warp's 16, and two neighbouring columns of every eight.
struct Rows {
  float out[HEAD_DIM / 2];
  float base[2];    // what scores are measured from, times log2(e); -inf: no key yet
  float sum[2];     // of the weights in this thread's columns
  int num_keys[2];  // that the row sees
};

// Starts S = Q K^T for the warpgroup's rows and a tile of keys.
__device__ __forceinline__ void start_scores(float (&scores)[TILE_KEYS / 2],
                                             const unsigned char* q_rows,
                                             const unsigned char* k_tile) {
  constexpr int Q_PANEL = TILE_ROWS * PANEL_ROW_BYTES;
  constexpr int K_PANEL = TILE_KEYS * PANEL_ROW_BYTES;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int panel = step / 4;  // 64 columns are 4 steps of 16, 32 bytes each
    const int bytes = step % 4 * 32;
    wgmma_rows<scalar_t>(scores, tile_descriptor(q_rows + panel * Q_PANEL + bytes, Q_PANEL),
                         tile_descriptor(k_tile + panel * K_PANEL + bytes, K_PANEL), step > 0);
  }
  wgmma_commit();
}

// Starts O += P V for the warpgroup's rows and a tile of values.
__device__ __forceinline__ void start_output(float (&out)[HEAD_DIM / 2],
                                             const uint32_t (&weights)[TILE_KEYS / 16][4],
                                             const unsigned char* v_tile) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < TILE_KEYS / 16; ++step) {
    wgmma_columns<scalar_t>(
        out, weights[step],
        tile_descriptor(v_tile + step * 16 * PANEL_ROW_BYTES, TILE_KEYS * PANEL_ROW_BYTES));
  }
  wgmma_commit();
}

// Turns scores into weights, and moves the bases of rows whose scores have grown too far above
// them. factor: what sums and output so far must be multiplied by; returns whether any is not 1.
// Whether a base moves depends on its row alone, so results do not depend on the rows beside it.
__device__ __forceinline__ bool weigh(float (&scores)[TILE_KEYS / 2], Rows& rows, int first_key,
                                      int num_keys_of_first, float scale_log2, float (&factor)[2]) {
  if (first_key + TILE_KEYS > num_keys_of_first) {  // else every row sees all keys of the tile
    const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < TILE_KEYS / 2; ++i) {
      if (column + i / 4 * 8 + i % 2 >= rows.num_keys[i / 2 % 2]) scores[i] = -INFINITY;
    }
  }
  bool moved = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 2 * half; i < TILE_KEYS / 2; i += 4) {
      largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float wanted = largest * scale_log2;
    const bool moves = wanted > rows.base[half] + SLACK;  // false while both are -inf
    factor[half] = moves ? exp2_fast(rows.base[half] - wanted) : 1.0f;
    rows.base[half] = moves ? wanted : rows.base[half];
    moved = moved || moves;
    // Of a row that has seen no key, (-inf) - (-inf) would be NaN; its weights are 0.
    const float base = rows.base[half] == -INFINITY ? 0.0f : rows.base[half];
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < TILE_KEYS / 2; i += 4) {
      scores[i] = exp2_fast(fmaf(scores[i], scale_log2, -base));
      scores[i + 1] = exp2_fast(fmaf(scores[i + 1], scale_log2, -base));
      sum += scores[i] + scores[i + 1];
    }
    rows.sum[half] = rows.sum[half] * factor[half] + sum;
  }
  return __any_sync(0xffffffffu, moved);
}

// Rounds weights for the second product. What a thread holds of d is what it must hold of a: two
// times 8 columns of d make 16 of a.
__device__ __forceinline__ void round_weights(uint32_t (&weights)[TILE_KEYS / 16][4],
                                              const float (&scores)[TILE_KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_KEYS / 4; ++i) {
    weights[i / 4][i % 4] = pack_floats(scores[2 * i], scores[2 * i + 1]);
  }
}

// A multiplying warpgroup. The scores of a tile are computed while the values of the one before
// are added up, and weighed while these may still be under way. The warpgroups take turns to start
// products, so that while one weighs the tensor cores are busy with another's.
__device__ __forceinline__ void consume(const unsigned char* q_rows, const unsigned char* stages,
                                        Barriers& barriers, Rows& rows, int consumer, int num_tiles,
                                        int num_keys_of_first, float scale_log2) {
  float scores[TILE_KEYS / 2];
  uint32_t weights[TILE_KEYS / 16][4];
  float factor[2];
  const bool speaks = threadIdx.x % WARP == 0;  // for its warp
  auto parity = [](int tile) { return tile / NUM_STAGES % 2; };
  auto k_tile = [&](int tile) { return stages + tile % NUM_STAGES * 2 * TILE_BYTES; };

  barrier_wait(&barriers.k_full[0], 0);
  fence_async_proxy();
  start_scores(scores, q_rows, k_tile(0));
  wgmma_wait<0>(scores);
  if (speaks) barrier_arrive(&barriers.k_empty[0]);
  weigh(scores, rows, 0, num_keys_of_first, scale_log2, factor);
  round_weights(weights, scores);

  for (int tile = 1; tile < num_tiles; ++tile) {
    const int stage = tile % NUM_STAGES;
    const int stage_before = (tile - 1) % NUM_STAGES;
    barrier_wait(&barriers.k_full[stage], parity(tile));
    fence_async_proxy();
    if (consumer > 0 || tile > 1) named_barrier_sync(TURN_BARRIER + consumer, 2 * WARPGROUP);
    start_scores(scores, q_rows, k_tile(tile));
    barrier_wait(&barriers.v_full[stage_before], parity(tile - 1));
    fence_async_proxy();
    start_output(rows.out, weights, k_tile(tile - 1) + TILE_BYTES);
    if (consumer + 1 < NUM_CONSUMERS || tile + 1 < num_tiles) {
      named_barrier_arrive(TURN_BARRIER + (consumer + 1) % NUM_CONSUMERS, 2 * WARPGROUP);
    }
    wgmma_wait<1>(scores);
    if (speaks) barrier_arrive(&barriers.k_empty[stage]);
    const bool moved = weigh(scores, rows, tile * TILE_KEYS, num_keys_of_first, scale_log2, factor);
    wgmma_wait<0>(rows.out);
    if (speaks) barrier_arrive(&barriers.v_empty[stage_before]);
    if (moved) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; ++i) rows.out[i] *= factor[i / 2 % 2];
    }
    round_weights(weights, scores);
  }
  const int last = num_tiles - 1;
  barrier_wait(&barriers.v_full[last % NUM_STAGES], parity(last));
  fence_async_proxy();
  start_output(rows.out, weights, k_tile(last) + TILE_BYTES);
  wgmma_wait<0>(rows.out);
}

// Normalises and writes the warp's 16 rows, the first of them `first_in_tile`. They go through the
// place of the queries, which are used up, so as to be written in rows of 16 bytes a lane.
__device__ __forceinline__ void write_rows(unsigned char* q_tile, const Rows& rows,
                                           scalar_t* __restrict__ out, float* __restrict__ lse,
                                           const Work& work, int group_size, int num_heads,
                                           int first_in_tile) {
  const int lane = threadIdx.x % WARP;
  // Where a row of the tile is in out and lse, in heads.
  auto place = [&](int row) {
    const int in_sequence = work.first_row + row;
    return (work.first_token + in_sequence / group_size) * num_heads + work.kv_head * group_size +
           in_sequence % group_size;
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row without keys is 0
    const int row = first_in_tile + 8 * half + lane / 4;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const float* pair = &rows.out[4 * i + 2 * half];
      *reinterpret_cast<uint32_t*>(q_tile + panel_offset(TILE_ROWS, row, i) + lane % 4 * 4) =
          pack_floats(pair[0] * inverse, pair[1] * inverse);
    }
    if (lse != nullptr && lane % 4 == 0 && row < work.num_rows) {
      // log2f(0) is -inf, and so is the base of a row without keys.
      lse[place(row)] = (rows.base[half] + log2f(sum)) * LN_2;
    }
  }
  __syncwarp();
  for (int c = lane; c < 16 * CHUNKS; c += WARP) {
    const int row = first_in_tile + c / CHUNKS;
    if (row >= work.num_rows) break;
    *reinterpret_cast<uint4*>(out + place(row) * HEAD_DIM + c % CHUNKS * CHUNK) =
        *reinterpret_cast<const uint4*>(q_tile + panel_offset(TILE_ROWS, row, c % CHUNKS));
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) KERNEL_NAME(prefill_sm90)(
    const scalar_t* __restrict__ q,        // [num_tokens, num_heads, HEAD_DIM], strided
    const scalar_t* __restrict__ k_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const scalar_t* __restrict__ v_cache,  // [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    const int* __restrict__ block_table,   // [num_seqs, table_stride]
    const int* __restrict__ seq_lens,      // [num_seqs]
    const int* __restrict__ cu_seqlens_q,  // [num_seqs + 1]
    scalar_t* __restrict__ out,            // [num_tokens, num_heads, HEAD_DIM]
    float* __restrict__ lse,               // [num_tokens, num_heads] or null
    int64_t q_token_stride, int64_t q_head_stride, int64_t k_block_stride, int64_t v_block_stride,
    int64_t table_stride, int num_seqs, int num_kv_heads, int group_size, int block_shift,
    float scale_log2) {  // scale * log2(e)
  DYNAMIC_SHARED(shared);
  __shared__ Barriers barriers;
  __shared__ Work work;
  const Steps steps = {block_table, seq_lens,     cu_seqlens_q, table_stride,
                       num_seqs,    num_kv_heads, group_size,   block_shift};
  if (threadIdx.x < WARP) work_of_block(work, steps, TILE_ROWS);

  // Panels start at multiples of 1024, or wgmma's swizzle would not be ours.
  unsigned char* q_tile = shared + (1024 - shared_address(shared) % 1024) % 1024;
  unsigned char* stages = q_tile + Q_BYTES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < NUM_STAGES; ++stage) {
      barrier_init(&barriers.k_full[stage], WARPGROUP);
      barrier_init(&barriers.v_full[stage], WARPGROUP);
      barrier_init(&barriers.k_empty[stage], NUM_CONSUMERS * WARPGROUP / WARP);
      barrier_init(&barriers.v_empty[stage], NUM_CONSUMERS * WARPGROUP / WARP);
    }
  }
  __syncthreads();
  if (work.num_rows == 0) return;

  const int num_tiles = (work.num_keys + TILE_KEYS - 1) / TILE_KEYS;
  // The same in all lanes, and known by the compiler to be.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP, 0);
  const int consumer = warp * WARP / WARPGROUP - 1;
  if (consumer < 0) {
    release_registers<PRODUCER_REGISTERS>();
    produce(stages, barriers, k_cache, v_cache, k_block_stride, v_block_stride, work, num_tiles,
            block_shift);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const int lane = threadIdx.x % WARP;
    const int first_in_tile = warp * 16 - 64;  // of the warp's rows
    copy_queries(q_tile, q, q_token_stride, q_head_stride, work, group_size, 64 * consumer);
    fence_async_proxy();
    named_barrier_sync(OWN_BARRIER + consumer, WARPGROUP);

    Rows rows;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) rows.out[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.first_row + first_in_tile + 8 * half + lane / 4;
      rows.base[half] = -INFINITY;
      rows.sum[half] = 0.0f;
      rows.num_keys[half] = work.first_position + row / group_size + 1;
    }
    if (num_tiles > 0) {
      consume(q_tile + 64 * consumer * PANEL_ROW_BYTES, stages, barriers, rows, consumer, num_tiles,
              work.num_keys_of_first, scale_log2);
    }
    // Other warps may still be reading these queries.
    named_barrier_sync(OWN_BARRIER + consumer, WARPGROUP);
    write_rows(q_tile, rows, out, lse, work, group_size, num_kv_heads * group_size, first_in_tile);
  }
}
