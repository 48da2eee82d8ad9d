// How rows of HEAD_DIM numbers lie in shared memory, so that ldmatrix meets no bank twice.
//
// ldmatrix reads 16 bytes (a chunk) of 8 rows at a time. Rows are a multiple of 128 bytes or a few
// more apart, so the same chunk of all 8 would lie in one or a few groups of banks. Chunks are
// therefore swapped within a row, by a pattern that gives the 8 rows 8 different groups.
// Where a chunk lies then is one line in decode_ring.cuh and one in prefill_tiles.cuh: the same
// number, multiplied out in the way that takes fewer registers there.
#pragma once

#include "common.cuh"

constexpr int CHUNK = Pack<scalar_t>::SIZE;  // numbers in 16 bytes
constexpr int CHUNKS = HEAD_DIM / CHUNK;     // in a row
static_assert(HEAD_DIM % CHUNK == 0 && CHUNKS % 2 == 0, "chunks are swapped within pairs at least");
static_assert(CHUNKS % 8 == 0 || CHUNKS % 8 == 4 || CHUNKS == 10, "no pattern was found for these");

// What the number of a chunk is XORed with. It depends on the last three bits of the row only.
__device__ __forceinline__ int swizzle(int row) {
  constexpr int REST = CHUNKS % 8;  // how far a row's banks are from those of the row before
  return REST == 0 ? row & 7 : REST == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
}
