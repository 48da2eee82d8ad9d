// A warp's online softmax over its slices on tensor cores, for 16-bit dtypes.
//
// The heads of a bundle are few, so they are the narrow side of each product:
//   scores [16 tokens, 8 heads] = K [16, HEAD_DIM] Q^T [HEAD_DIM, 8]
//   O^T [HEAD_DIM, 8 heads]    += V^T [HEAD_DIM, 16 tokens] P^T [16, 8]
// With g = lane / 4 and t = lane % 4, a lane holds scores of tokens g and g + 8 for the heads 2t
// and 2t + 1, and of O channels for the same two heads: it can rescale O by itself.
// Scores, exponentials, sums and O are fp32; the weights are rounded to the dtype for the product.
#pragma once

#include <cfloat>

#include "partials.cuh"

constexpr int K_STEPS = HEAD_DIM / 16;  // steps of the first product, rows of tiles of the second
static_assert(HEAD_DIM % 16 == 0, "a tensor core takes 16 channels at a time");

template <typename T>
struct WarpState {
  static constexpr int QUERY_BYTES = 0;  // queries stay in registers

  uint32_t q[GROUP_TILES][K_STEPS][2];  // Q^T as operand b; heads past the bundle's are zeros
  float o[GROUP_TILES][K_STEPS][4];     // not yet divided by the sum of weights
  float max[GROUP_TILES][2];            // of the scores so far, the same in all lanes of a head
  float sum[GROUP_TILES][2];            // of the weights of this lane's tokens

  __device__ __forceinline__ void begin(const Inputs& in, int seq, const Bundle& bundle, float*) {
    const int lane = threadIdx.x % WARP;
    const bool in_pairs = (in.q_seq_stride | in.q_head_stride) % 2 == 0 &&
                          reinterpret_cast<uintptr_t>(in.q) % sizeof(Two<T>) == 0;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; ++tile) {
      const int head = tile * 8 + lane / 4;
      const bool is_head = head < bundle.num_heads;
      const T* row = in.q + seq * in.q_seq_stride + (bundle.first_head + head) * in.q_head_stride +
                     lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2 * K_STEPS; ++i) {
        uint32_t two = 0;
        if (is_head && in_pairs) two = *reinterpret_cast<const uint32_t*>(row + i * 8);
        if (is_head && !in_pairs) two = pack_two(row[i * 8], row[i * 8 + 1]);
        q[tile][i / 2][i % 2] = two;
      }
#pragma unroll
      for (int i = 0; i < K_STEPS; ++i) {
        for (int j = 0; j < 4; ++j) o[tile][i][j] = 0.0f;
      }
      for (int j = 0; j < 2; ++j) {
        max[tile][j] = -INFINITY;
        sum[tile][j] = 0.0f;
      }
    }
  }

  // Takes in the first num_valid tokens of a slice, at least one.
  __device__ __forceinline__ void attend(const unsigned char* stage, int num_valid,
                                         float scale_log2) {
    const int lane = threadIdx.x % WARP;
    // Two sums, so that half as many products wait for the one before.
    float scores[GROUP_TILES][4] = {}, others[GROUP_TILES][4] = {};
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      uint32_t k[4];
      ldmatrix_x4(k, stage + chunk_offset(lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; ++tile) {
        mma_m16n8k16<T>(step % 2 ? others[tile] : scores[tile], k, q[tile][step]);
      }
    }
    uint32_t weights[GROUP_TILES][2];
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][i] += others[tile][i];
      weigh(scores[tile], tile, num_valid, scale_log2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Tokens were rows; the second product wants them as the dimension that is summed over.
        const float* row = scores[tile] + 2 * half;
        weights[tile][half] = movmatrix_trans(pack_floats<T>(row[0], row[1]));
      }
    }
    const unsigned char* v_slice = stage + SLICE_BYTES;
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
      uint32_t v[4];
      const int token = lane % 8 + lane / 16 * 8;
      ldmatrix_x4_trans(v, v_slice + chunk_offset(token, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int tile = 0; tile < GROUP_TILES; ++tile) {
        mma_m16n8k16<T>(o[tile][step], v, weights[tile]);
      }
    }
  }

  // Turns scores into weights relative to the largest score so far, and brings sum and O to it.
  __device__ __forceinline__ void weigh(float (&scores)[4], int tile, int num_valid,
                                        float scale_log2) {
    const int token = threadIdx.x % WARP / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] *= scale_log2;
    if (num_valid < SLICE) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (token + i / 2 * 8 >= num_valid) scores[i] = -INFINITY;
      }
    }
    float largest[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      largest[j] = fmaxf(scores[j], scores[2 + j]);
      for (int mask = 4; mask < WARP; mask *= 2) {
        largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], mask));
      }
      // Finite even if every score is -inf: (-inf) - (-inf) would be NaN.
      largest[j] = fmaxf(fmaxf(largest[j], max[tile][j]), -FLT_MAX);
    }
    // Seldom true after the first slices, and then O can stay as it is.
    if (__any_sync(0xffffffffu, largest[0] != max[tile][0] || largest[1] != max[tile][1])) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float rescale = exp2_fast(max[tile][j] - largest[j]);  // 0 the first time
        max[tile][j] = largest[j];
        sum[tile][j] *= rescale;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          o[tile][step][j] *= rescale;
          o[tile][step][2 + j] *= rescale;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = exp2_fast(scores[i] - largest[i % 2]);
      sum[tile][i % 2] += scores[i];
    }
  }

  // Hands the state over to the block.
  __device__ __forceinline__ void put(const States& states, int num_heads) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int tile = 0; tile < GROUP_TILES; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float total = sum[tile][j];
        for (int mask = 4; mask < WARP; mask *= 2) {
          total += __shfl_xor_sync(0xffffffffu, total, mask);
        }
        const int head = tile * 8 + lane % 4 * 2 + j;
        if (head >= num_heads) continue;
        if (lane / 4 == 0) states.scale(warp, head) = {max[tile][j], total};
        float* row = states.row(warp, head) + lane / 4;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          row[step * 16] = o[tile][step][j];
          row[step * 16 + 8] = o[tile][step][2 + j];
        }
      }
    }
  }
};
