// A block's way through its segments: the part that fd_split and paged_attention share.
//
// Required constants, chosen on the host (decode_shape.py):
//   WARPS        warps of a block, 1 to 4
//   STAGES       slices in a warp's ring
//   GROUP_TILES  1 or 2: a bundle has at most 8 or 16 query heads
//   CTAS         blocks that a multiprocessor is to hold
#pragma once

#if !defined(HEAD_DIM) || !defined(WARPS) || !defined(STAGES) || !defined(GROUP_TILES) || \
    !defined(CTAS)
#error "compile with -DHEAD_DIM, -DWARPS, -DSTAGES, -DGROUP_TILES and -DCTAS"
#endif

constexpr int HEADS = 8 * GROUP_TILES;

#include "decode_fp32.cuh"

// Dynamic shared memory: the rings of the warps, their states, then the queries in fp32.
struct Shared {
  unsigned char* ring;  // this warp's
  States states;
  float* queries;

  __device__ __forceinline__ Shared(unsigned char* memory, int bundle_size) {
    ring = memory + threadIdx.x / WARP * RING_BYTES;
    states.o = reinterpret_cast<float*>(memory + WARPS * RING_BYTES);
    queries = states.o + WARPS * bundle_size * STATE_ROW;
    constexpr int QUERY_FLOATS = WarpState<scalar_t>::QUERY_BYTES / sizeof(float);
    states.scales = reinterpret_cast<Scale*>(queries + QUERY_FLOATS);
    states.bundle_size = bundle_size;
  }
};

// Leaves the block's result of a segment where it belongs. Every thread of the block calls it.
__device__ __forceinline__ void finish_segment(const Segment& segment, const Bundle& bundle,
                                               const States& states, const Partials& partials,
                                               const Outputs& outputs) {
  __syncthreads();  // every warp has put its state
  if (segment.num_partials > 1) {
    write_partial(states, partials, segment.slot, bundle.num_heads);
    if (partials.counters == nullptr ||  // fd_combine comes behind
        !is_last_of(partials.counters + segment.first_slot, segment.num_partials)) {
      return;
    }
    read_partials<balanced_slot>(partials, states, segment.first_slot, segment.num_partials,
                                 bundle.num_heads);
    __syncthreads();
  }
  write_result(states, outputs, segment.seq, bundle.first_head, bundle.num_heads);
}

// Works off a block's segments. Loads run ahead through all of them, so that memory is busy while
// the warps meet at the end of one.
__device__ __forceinline__ void decode(const Inputs& in, const Work& work, const Partials& partials,
                                       const Outputs& outputs, const Shared& shared) {
  const int warp = threadIdx.x / WARP;
  Prefetcher ahead(in, work);
  WarpState<scalar_t> state;
  Segment segment = work.lead;
  Bundle bundle = bundle_of(segment.kv_head, segment.part, in.group_size);
  state.begin(in, segment.seq, bundle, shared.queries);
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    ahead.load_next(shared.ring + stage * STAGE_BYTES);
    cp_async_commit();
  }
  int stage = 0;
  for (int num_done = 0;;) {
    for (int tile = 0; tile < segment.num_tiles; ++tile) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();  // what other lanes copied is there, and all have read the stage before
      const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
      ahead.load_next(shared.ring + free_stage * STAGE_BYTES);
      cp_async_commit();  // empty at the end, so that the count of groups stays right
      const int token = (segment.first_tile + tile) * TILE + warp * SLICE;
      if (token < segment.seq_len) {
        state.attend(shared.ring + stage * STAGE_BYTES, segment.seq_len - token, in.scale_log2);
      }
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    state.put(shared.states, bundle.num_heads);
    finish_segment(segment, bundle, shared.states, partials, outputs);
    if (num_done == work.num_rest) return;
    segment = load_record(work.rest + num_done++);
    bundle = bundle_of(segment.kv_head, segment.part, in.group_size);
    __syncthreads();  // the states have been read
    state.begin(in, segment.seq, bundle, shared.queries);
  }
}
