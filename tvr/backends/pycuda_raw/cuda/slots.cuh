// Where a token lies in a paged cache [blocks, num_kv_heads, block_size, HEAD_DIM], whose inner
// three dimensions are contiguous.
#pragma once

#include "rows.cuh"

// Elements from the cache's start to the slot's first head; the same slot of the next head is
// block_size * HEAD_DIM further. 64 bits: a pool may hold more than 2^31 elements.
__device__ __forceinline__ int64_t slot_offset(int64_t slot, int64_t block_stride,
                                               int block_shift) {
  const int64_t block = slot >> block_shift;
  const int64_t token = slot - (block << block_shift);
  return block * block_stride + token * HEAD_DIM;
}
