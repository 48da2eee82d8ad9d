// Who reads which keys in a decode step: what fd_plan writes and fd_split works off.
//
// A bundle is the query heads that one block works on together: those of one KV head, or a part of
// them where they are too many. A pair is a sequence and a bundle; its keys are cut into tiles of
// as many tokens as a block takes at a time.
#pragma once

#include "common.cuh"

// A run of tiles of one pair, worked off by one block. 32 bytes: two loads.
struct alignas(16) Segment {
  int seq;           // row of q, of the block table and of the output
  short kv_head;     // with `part`: the bundle
  short part;        // of the query heads of the KV head
  int first_tile;    // within the pair
  int num_tiles;     // at least 1
  int seq_len;       // tokens of the sequence
  int slot;          // where the partial result goes, if there are others of the pair
  int first_slot;    // of the pair
  int num_partials;  // of the pair; 1: this is all of it, and the result goes to the output
};

// One block's share of a step, at a fixed place, so that most blocks read nothing else.
struct alignas(16) BlockWork {
  int num_rest;     // segments beside the lead
  int first_rest;   // the first of them in the list of segments
  int first_empty;  // in the list of sequences without keys
  int num_empty;
  Segment lead;  // the first to be worked off, though the last of the run; num_tiles 0: nothing
};

// Reads a record in loads of 16 bytes that all start at once, and are not put off to where a field
// is first needed: a block begins with them.
template <typename T>
__device__ __forceinline__ T load_record(const T* record) {
  static_assert(sizeof(T) % 16 == 0 && alignof(T) == 16, "a record is made of 16 bytes");
  T loaded;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 16); ++i) {
    reinterpret_cast<uint4*>(&loaded)[i] = load_16_once(reinterpret_cast<const uint4*>(record) + i);
  }
  return loaded;
}

// A balanced plan cuts the tiles of all pairs, laid end to end, into equal runs, one a block. So a
// block has at most two partial results: of the pair that it goes on with from the block before
// (slot 2 * block), and of the one that it leaves to the next (slot 2 * block + 1). With c the
// block that a pair begins in, its partials are in the slots 2c + 1, 2c + 2, 2c + 4, 2c + 6 ...
__device__ __forceinline__ int balanced_slot(int first_slot, int i) {
  return i == 0 ? first_slot : first_slot - 1 + 2 * i;
}

// A plan of fixed splits has the partials of a pair side by side.
__device__ __forceinline__ int fixed_slot(int first_slot, int i) { return first_slot + i; }
