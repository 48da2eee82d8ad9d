// Tiles of Q, K and V in shared memory for the tensor cores: rows of HEAD_DIM 16-bit numbers.
#pragma once

#include "swizzle.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int SLICE = 16;  // tokens that are sure to lie in one block of the cache

static_assert(HEAD_DIM % 16 == 0, "a tensor core takes 16 channels at a time");
static_assert(sizeof(scalar_t) == 2, "tensor cores take 16-bit numbers; see prefill_fp32.cu");

// Where a chunk of a row lies in a tile, in bytes.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * ROW_BYTES + (chunk ^ swizzle(row)) * 16;
}

// Starts copying a chunk, at a multiple of 16 bytes, to a tile; zeros if not `valid`.
__device__ __forceinline__ void copy_chunk(unsigned char* tile, int row, int chunk,
                                           const scalar_t* __restrict__ source, bool valid) {
  cp_async_16(tile + chunk_offset(row, chunk), source, valid);
}

// The same for a chunk that lies anywhere, which is done on return.
__device__ __forceinline__ void copy_unaligned_chunk(unsigned char* tile, int row, int chunk,
                                                     const scalar_t* __restrict__ source,
                                                     bool valid) {
  scalar_t* target = reinterpret_cast<scalar_t*>(tile + chunk_offset(row, chunk));
#pragma unroll 1
  for (int i = 0; i < CHUNK; ++i) target[i] = valid ? source[i] : from_float<scalar_t>(0.0f);
}

// Copies 16 tokens of a block of a cache, from number `offset` of the block on, to rows first_row
// and on of a tile; 16 divides first_row. Rows from num_valid on become zeros, and are not read:
// they may hold NaN, of which 0 * NaN would be left in the sum. Called by a warp; the tokens are
// one run of memory.
__device__ __forceinline__ void copy_slice(unsigned char* tile, int first_row,
                                           const scalar_t* __restrict__ block, int offset,
                                           int num_valid, bool aligned) {
  constexpr int SLICE_CHUNKS = SLICE * CHUNKS;
  static_assert(SLICE_CHUNKS % WARP == 0, "every lane copies as many chunks");
  const int lane = threadIdx.x % WARP;
  if (aligned && WARP % CHUNKS == 0) {
    // The swizzle is linear in a row's bits: that of a sum of two rows without a bit in common is
    // the XOR of theirs. So only constants depend on i, and one or two addresses do for all chunks.
    const scalar_t* source = block + (offset + lane * CHUNK);
    const int row = lane / CHUNKS;
    unsigned char* target = tile + (first_row + row) * ROW_BYTES;
    const int swizzled = (lane % CHUNKS ^ swizzle(row)) * 16;
#pragma unroll
    for (int i = 0; i < SLICE_CHUNKS / WARP; ++i) {
      const int below = i * (WARP / CHUNKS);
      cp_async_16(target + below * ROW_BYTES + (swizzled ^ swizzle(below) * 16),
                  source + i * WARP * CHUNK, row + below < num_valid);
    }
  } else if (aligned) {
#pragma unroll
    for (int c = lane; c < SLICE_CHUNKS; c += WARP) {
      copy_chunk(tile, first_row + c / CHUNKS, c % CHUNKS, block + (offset + c * CHUNK),
                 c / CHUNKS < num_valid);
    }
  } else {
#pragma unroll 1
    for (int c = lane; c < SLICE_CHUNKS; c += WARP) {
      copy_unaligned_chunk(tile, first_row + c / CHUNKS, c % CHUNKS, block + (offset + c * CHUNK),
                           c / CHUNKS < num_valid);
    }
  }
}

// The 16 x 16 numbers at rows first_row and on, columns 16 * k and on, as operand a of the tensor
// cores; and, transposed, as two operands b.
__device__ __forceinline__ const unsigned char* matrix_address(const unsigned char* tile,
                                                               int first_row, int k) {
  const int lane = threadIdx.x % WARP;
  return tile + chunk_offset(first_row + lane % 16, 2 * k + lane / 16);
}

// The same for 16 rows as two operands b that are not transposed.
__device__ __forceinline__ const unsigned char* columns_address(const unsigned char* tile,
                                                                int first_row, int k) {
  const int lane = threadIdx.x % WARP;
  return tile + chunk_offset(first_row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2);
}
