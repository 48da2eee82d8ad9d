// A warp's online softmax over its slices in true fp32: tensor cores would round to TF32.
//
// For the scores a lane has one token (lane % 16) and one half of the channels; for O it has four
// channels of each head (eight where a head has more than 128).
#pragma once

#include <cfloat>

#include "decode_mma.cuh"

template <>
struct WarpState<float> {
  static constexpr int QUERY_BYTES = HEADS * HEAD_DIM * static_cast<int>(sizeof(float));
  static constexpr int LANE_QUADS = (QUADS + WARP - 1) / WARP;  // of O

  const float* q;  // [HEADS, HEAD_DIM] in shared memory; heads past the bundle's are zeros
  Pack<float> o[HEADS][LANE_QUADS];
  float max[HEADS];
  float sum[HEADS];  // of the weights of this lane's tokens

  __device__ __forceinline__ void begin(const Inputs& in, int seq, const Bundle& bundle,
                                        float* queries) {
    // The block has left the last segment behind: nobody reads its queries any more.
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
      const int head = i / HEAD_DIM;
      const int64_t row = seq * in.q_seq_stride + (bundle.first_head + head) * in.q_head_stride;
      queries[i] = head < bundle.num_heads ? to_float(in.q[row + i % HEAD_DIM]) : 0.0f;
    }
    __syncthreads();
    q = queries;
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      for (int i = 0; i < LANE_QUADS; ++i) o[head][i] = {{0.0f, 0.0f, 0.0f, 0.0f}};
      max[head] = -INFINITY;
      sum[head] = 0.0f;
    }
  }

  // Takes in the first num_valid tokens of a slice, at least one.
  __device__ __forceinline__ void attend(const unsigned char* stage, int num_valid,
                                         float scale_log2) {
    const int lane = threadIdx.x % WARP, token = lane % SLICE;
    const int first_chunk = lane / SLICE * (QUADS / 2);
    float weights[HEADS] = {};
#pragma unroll 2
    for (int i = 0; i < QUADS / 2; ++i) {
      const int chunk = first_chunk + i;
      const auto k = *reinterpret_cast<const Pack<float>*>(stage + chunk_offset(token, chunk));
#pragma unroll
      for (int head = 0; head < HEADS; ++head) {
        const auto channels =
            *reinterpret_cast<const Pack<float>*>(q + head * HEAD_DIM + chunk * QUAD);
        for (int j = 0; j < QUAD; ++j) weights[head] += k.values[j] * channels.values[j];
      }
    }
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      float score = weights[head] + __shfl_xor_sync(0xffffffffu, weights[head], SLICE);
      score = token < num_valid ? score * scale_log2 : -INFINITY;
      // Finite even if every score is -inf: (-inf) - (-inf) would be NaN.
      const float largest = fmaxf(fmaxf(max[head], warp_max(score)), -FLT_MAX);
      const float rescale = exp2_fast(max[head] - largest);  // 0 the first time
      weights[head] = exp2_fast(score - largest);
      max[head] = largest;
      sum[head] = sum[head] * rescale + weights[head];
      for (int i = 0; i < LANE_QUADS; ++i) {
        for (int j = 0; j < QUAD; ++j) o[head][i].values[j] *= rescale;
      }
    }
    add_values(stage + SLICE_BYTES, weights);
  }

  __device__ __forceinline__ void add_values(const unsigned char* v_slice,
                                             const float (&weights)[HEADS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 2
    for (int token = 0; token < SLICE; ++token) {
      Pack<float> v[LANE_QUADS];
#pragma unroll
      for (int i = 0; i < LANE_QUADS; ++i) {
        // Lanes past the head's end work on its last chunk, and keep the result to themselves.
        const int chunk = min(lane + i * WARP, QUADS - 1);
        v[i] = *reinterpret_cast<const Pack<float>*>(v_slice + chunk_offset(token, chunk));
      }
#pragma unroll
      for (int head = 0; head < HEADS; ++head) {
        const float weight = __shfl_sync(0xffffffffu, weights[head], token);
        for (int i = 0; i < LANE_QUADS; ++i) {
          for (int j = 0; j < QUAD; ++j) o[head][i].values[j] += weight * v[i].values[j];
        }
      }
    }
  }

  // Hands the state over to the block.
  __device__ __forceinline__ void put(const States& states, int num_heads) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int head = 0; head < HEADS; ++head) {
      float total = sum[head];  // both halves of the warp have all tokens
      for (int mask = 1; mask < SLICE; mask *= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, mask);
      }
      if (head >= num_heads) continue;
      if (lane == 0) states.scale(warp, head) = {max[head], total};
#pragma unroll
      for (int i = 0; i < LANE_QUADS; ++i) {
        const int chunk = lane + i * WARP;
        if (chunk >= QUADS) continue;
        *reinterpret_cast<Pack<float>*>(states.row(warp, head) + chunk * QUAD) = o[head][i];
      }
    }
  }
};
