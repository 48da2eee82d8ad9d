// Which rows a block of prefill attention works on, and whose they are.
//
// The query heads of a KV head are packed into rows: of a sequence's new tokens, row r is token
// r / group_size, head r % group_size of its group. So a tile of rows reads K and V once for the
// whole group, and a chunk of few tokens still fills it.
#pragma once

#include "common.cuh"

// How the tensor-core kernels keep weights in range: these are 2^(score - base). The base is the
// row's largest score, or has been: it follows only when that has grown by more than SLACK, which
// costs a pass over the output and seldom happens. Weights up to 2^8 are as exact as those up to 1,
// and their sum is far from fp32's end.
constexpr float SLACK = 8.0f;

// What a step's sequences are, as the kernels are given them.
struct Steps {
  const int* block_table;   // [num_seqs, table_stride]
  const int* seq_lens;      // [num_seqs]
  const int* cu_seqlens_q;  // [num_seqs + 1]
  int64_t table_stride;     // entries from a sequence to the next
  int num_seqs;
  int num_kv_heads;
  int group_size;
  int block_shift;  // block_size is 1 << block_shift
};

// A tile of rows of one sequence and one KV head.
struct Work {
  const int* blocks;    // the sequence's row of the block table
  int64_t first_token;  // of the sequence, on the flat token axis
  int first_row;        // of the tile, counted from the sequence's first new token
  int num_rows;         // of the tile; 0: nothing to do
  int kv_head;
  int first_position;     // of the sequence's token 0: below 0 if it has more tokens than keys
  int num_keys;           // that the last row sees, which are all that the tile needs
  int num_keys_of_first;  // that the first row sees, and with it every row
};

// Sequence s may have its tiles at slots first_slot(s) up to first_slot(s + 1): never too few,
// since floor(a + b) - floor(a) + 1 is at least ceil(b), and at most one too many. So no list of
// tiles has to be made, and the grid's size follows from the numbers of tokens and sequences.
__device__ __forceinline__ int first_slot(const Steps& steps, int s, int tile_rows) {
  return steps.cu_seqlens_q[s] * steps.group_size / tile_rows + s;
}

// The sequence that a slot belongs to. The lanes of a warp look at 32 sequences at once: a binary
// search would wait for memory once for each bit of num_seqs, and all of the block waits for it.
__device__ __forceinline__ int sequence_of_slot(const Steps& steps, int slot, int tile_rows) {
  const int lane = threadIdx.x % WARP;
  int first = 0;
  int count = steps.num_seqs;
  while (count > 1) {
    const int stride = (count + WARP - 1) / WARP;
    const int s = first + lane * stride;
    const bool starts = s < first + count && first_slot(steps, s, tile_rows) <= slot;
    const int last = __popc(__ballot_sync(0xffffffffu, starts)) - 1;  // lane 0 always starts
    first += last * stride;
    count = min(stride, count - last * stride);
  }
  return first;
}

// Finds the tile of this block. Called by a warp; `work` is in shared memory. Late tiles see the
// most keys and come first, so that what runs at the end, when there is too little left to fill the
// device, is short.
__device__ __forceinline__ void work_of_block(Work& work, const Steps& steps, int tile_rows) {
  const int num_slots = gridDim.x / steps.num_kv_heads;
  const int slot = num_slots - 1 - blockIdx.x / steps.num_kv_heads;
  const int s = sequence_of_slot(steps, slot, tile_rows);
  const int first_token = steps.cu_seqlens_q[s];
  const int q_len = steps.cu_seqlens_q[s + 1] - first_token;

  if (threadIdx.x != 0) return;
  work.blocks = steps.block_table + s * steps.table_stride;
  work.first_token = first_token;
  work.first_row = (slot - first_slot(steps, s, tile_rows)) * tile_rows;
  work.num_rows = max(0, min(tile_rows, q_len * steps.group_size - work.first_row));
  work.kv_head = blockIdx.x % steps.num_kv_heads;
  work.first_position = steps.seq_lens[s] - q_len;  // the mask is aligned bottom-right
  const int last_row = work.first_row + work.num_rows - 1;
  work.num_keys = max(0, work.first_position + last_row / steps.group_size + 1);
  work.num_keys_of_first = max(0, work.first_position + work.first_row / steps.group_size + 1);
}
