// States of the online softmax and their merge.
//
// The state of some keys is (o, max, sum): with weights 2^(score - max), sum is the sum of weights
// and o the weighted sum of values. Two states are merged by bringing both to the larger maximum:
//   max = max(max1, max2), sum = sum1 2^(max1 - max) + sum2 2^(max2 - max), o likewise,
// and only the last is normalised: the result is o / sum, and lse = ln 2 (max + log2(sum)). Merging
// is exact but for rounding, so keys can be cut among lanes, warps and blocks in any way.
// All of it is fp32. A state of no keys has max -inf and weighs nothing.
#pragma once

#include "decode_ring.cuh"

constexpr int QUAD = 4;  // channels that a thread merges at a time
constexpr int QUADS = HEAD_DIM / QUAD;
constexpr int STATE_ROW = HEAD_DIM + 4;  // floats; the 4 put the heads of a warp in other banks
static_assert(HEAD_DIM % QUAD == 0, "a head is merged in quads");

struct alignas(8) Scale {
  float max;
  float sum;
};

// The states of a block's warps, in shared memory.
struct States {
  float* o;         // [WARPS, bundle_size, STATE_ROW]
  Scale* scales;    // [WARPS, bundle_size]
  int bundle_size;  // most heads of a bundle

  __device__ __forceinline__ float* row(int warp, int head) const {
    return o + (warp * bundle_size + head) * STATE_ROW;
  }
  __device__ __forceinline__ Scale& scale(int warp, int head) const {
    return scales[warp * bundle_size + head];
  }
};

// Results of blocks that share a pair with others, in the workspace.
struct Partials {
  float* o;       // [slots, bundle_size, HEAD_DIM]
  Scale* scales;  // [slots, bundle_size]
  int* counters;  // [slots] blocks that are done, at the pair's first slot; null: not counted
  int bundle_size;
};

struct Outputs {
  scalar_t* out;  // [num_seqs, num_heads, HEAD_DIM]
  float* lse;     // [num_seqs, num_heads]; may be null
  int num_heads;
};

struct alignas(QUAD * sizeof(scalar_t)) OutQuad {
  scalar_t values[QUAD];
};

// Four channels of a head's state.
struct QuadState {
  Pack<float> o = {{0.0f, 0.0f, 0.0f, 0.0f}};
  Scale scale = {-INFINITY, 0.0f};

  // Adds another state, whose weights are to be relative to `max`, as this one's are already.
  __device__ __forceinline__ void add(const Pack<float>& other, const Scale& other_scale) {
    const float weight = exp2_fast(other_scale.max - scale.max);
    scale.sum += weight * other_scale.sum;
#pragma unroll
    for (int j = 0; j < QUAD; ++j) o.values[j] += weight * other.values[j];
  }
};

// The merged state of the warps. At least one of them has seen a key, so the maximum is finite.
__device__ __forceinline__ QuadState merge_warps(const States& states, int head, int channel) {
  QuadState merged;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    merged.scale.max = fmaxf(merged.scale.max, states.scale(warp, head).max);
  }
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) {
    const float* row = states.row(warp, head) + channel;
    merged.add(*reinterpret_cast<const Pack<float>*>(row), states.scale(warp, head));
  }
  return merged;
}

// Writes the result of a bundle from the states of the warps.
__device__ __forceinline__ void write_result(const States& states, const Outputs& outputs, int seq,
                                             int first_head, int num_heads) {
  for (int i = threadIdx.x; i < num_heads * QUADS; i += THREADS) {
    const int head = i / QUADS, channel = i % QUADS * QUAD;
    const QuadState merged = merge_warps(states, head, channel);
    const int64_t row = static_cast<int64_t>(seq) * outputs.num_heads + first_head + head;
    const float inverse = 1.0f / merged.scale.sum;
    OutQuad result;
#pragma unroll
    for (int j = 0; j < QUAD; ++j) {
      result.values[j] = from_float<scalar_t>(merged.o.values[j] * inverse);
    }
    *reinterpret_cast<OutQuad*>(outputs.out + row * HEAD_DIM + channel) = result;
    if (outputs.lse != nullptr && channel == 0) {
      outputs.lse[row] = LN_2 * (merged.scale.max + log2f(merged.scale.sum));
    }
  }
}

// Writes what the block has of a pair that it shares with others.
__device__ __forceinline__ void write_partial(const States& states, const Partials& partials,
                                              int slot, int num_heads) {
  for (int i = threadIdx.x; i < num_heads * QUADS; i += THREADS) {
    const int head = i / QUADS, channel = i % QUADS * QUAD;
    const QuadState merged = merge_warps(states, head, channel);
    const int64_t row = static_cast<int64_t>(slot) * partials.bundle_size + head;
    *reinterpret_cast<Pack<float>*>(partials.o + row * HEAD_DIM + channel) = merged.o;
    if (channel == 0) partials.scales[row] = merged.scale;
  }
}

// Merges every WARPS-th partial of a pair into the warp's state, always in the same order. SLOT
// says where the i-th partial is.
template <int (*SLOT)(int, int)>
__device__ __forceinline__ void read_partials(const Partials& partials, const States& states,
                                              int first_slot, int num_partials, int num_heads) {
  constexpr int BATCH = 8;  // partials on their way at once: each is one trip to memory
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  for (int i = lane; i < num_heads * QUADS; i += WARP) {
    const int head = i / QUADS, channel = i % QUADS * QUAD;
    QuadState merged;
    for (int first = warp; first < num_partials; first += BATCH * WARPS) {
      QuadState batch[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int partial = first + j * WARPS;
        if (partial >= num_partials) continue;
        const int slot = SLOT(first_slot, partial);
        const int64_t row = static_cast<int64_t>(slot) * partials.bundle_size + head;
        batch[j].scale = partials.scales[row];
        batch[j].o = *reinterpret_cast<const Pack<float>*>(partials.o + row * HEAD_DIM + channel);
      }
      QuadState before = merged;
      merged = QuadState();
      merged.scale.max = before.scale.max;
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        merged.scale.max = fmaxf(merged.scale.max, batch[j].scale.max);
      }
      // Finite: the first of a batch is always there, and has keys.
      merged.add(before.o, before.scale);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) merged.add(batch[j].o, batch[j].scale);
    }
    *reinterpret_cast<Pack<float>*>(states.row(warp, head) + channel) = merged.o;
    if (channel == 0) states.scale(warp, head) = merged.scale;
  }
}

// Counts this block among those that are done with a pair. True for the last of them, which then
// sees what the others have written; it sets the counter back for the next layer.
__device__ __forceinline__ bool is_last_of(int* counter, int num_partials) {
  __shared__ bool is_last;
  __syncthreads();  // the block has written all of its partial
  if (threadIdx.x == 0) {
    is_last = count_arrival(counter, 1) == num_partials - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  return is_last;
}

// Zeros and lse -inf for a sequence without keys.
__device__ __forceinline__ void write_empty(const Outputs& outputs, int seq) {
  const int64_t first_row = static_cast<int64_t>(seq) * outputs.num_heads;
  OutQuad zeros;
  for (int j = 0; j < QUAD; ++j) zeros.values[j] = from_float<scalar_t>(0.0f);
  for (int i = threadIdx.x; i < outputs.num_heads * QUADS; i += THREADS) {
    reinterpret_cast<OutQuad*>(outputs.out + first_row * HEAD_DIM)[i] = zeros;
  }
  if (outputs.lse == nullptr) return;
  for (int head = threadIdx.x; head < outputs.num_heads; head += THREADS) {
    outputs.lse[first_row + head] = -INFINITY;
  }
}
