// Cuts a decode step into the shares of fd_split's blocks, once a step; all layers use them.
//
// Grid: 1. Block: 1024 threads. Shared memory: static only.
// Required: -DDTYPE, for the name only. SMs: all. Numerics: integers.
// Alone: nvcc -cubin -arch=sm_90 -std=c++17 -O3 --expt-relaxed-constexpr -DDTYPE=bf16 fd_plan.cu
//
// The lengths of the sequences are known on the device only, since a captured graph is replayed
// with others. So the grid of fd_split is fixed, and what its blocks do is data.
// Units are what is shared out: tiles if the plan is balanced, whole splits if they are fixed.
// Those of a pair stand together, the bundles of a sequence one behind the other.
#include "common.cuh"
#include "decode_work.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;

// Balanced: to merge partial results costs about as much time as a block needs for so many tiles,
// so where all sequences are as short as this each pair stays whole.
constexpr int SOLO_TILES = 8;

struct Sums {
  int units;  // of a head of each sequence
  int full;   // sequences with keys
  int longest;
};

// The sums of what the threads before this one hold, and of all; `longest` is a maximum, of all.
struct Scan {
  Sums before;
  Sums total;
};

__device__ __forceinline__ Scan scan_block(int units, int full) {
  __shared__ Sums of_warp[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  Sums sums = {units, full, units};
  for (int step = 1; step < WARP; step *= 2) {
    const int more_units = __shfl_up_sync(0xffffffffu, sums.units, step);
    const int more_full = __shfl_up_sync(0xffffffffu, sums.full, step);
    const int other = __shfl_xor_sync(0xffffffffu, sums.longest, step);
    if (lane >= step) {
      sums.units += more_units;
      sums.full += more_full;
    }
    sums.longest = max(sums.longest, other);
  }
  __syncthreads();  // the sums of the call before have been read
  if (lane == WARP - 1) of_warp[warp] = sums;
  __syncthreads();
  Scan scan = {{sums.units - units, sums.full - full, 0}, {0, 0, 0}};
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) {
      scan.before.units += scan.total.units;
      scan.before.full += scan.total.full;
    }
    scan.total.units += of_warp[i].units;
    scan.total.full += of_warp[i].full;
    scan.total.longest = max(scan.total.longest, of_warp[i].longest);
  }
  return scan;
}

struct Plan {
  const int* __restrict__ seq_lens;  // [num_seqs]
  const int* starts;                 // [num_seqs + 1] units of a head of the sequences before
  const int* ranks;                  // [num_seqs] sequences with keys among those before
  int num_seqs;
  int num_bundles;
  int num_parts;  // bundles of a KV head
  int tile_tokens;
  int max_splits;       // of a pair; 0: balanced
  int min_split_tiles;  // fixed: no split is to be shorter
  int total;            // units of all pairs
  int per_block;        // balanced: tiles of a block

  __device__ __forceinline__ int tiles(int seq) const {
    return (seq_lens[seq] + tile_tokens - 1) / tile_tokens;
  }

  // Depends on the sequence's own length only: so does, bit for bit, what is computed for it.
  __device__ __forceinline__ int split_tiles(int tiles) const {
    return max(min_split_tiles, (tiles + max_splits - 1) / max_splits);
  }

  __device__ __forceinline__ int units(int seq) const {
    const int num_tiles = tiles(seq);
    if (max_splits == 0 || num_tiles == 0) return num_tiles;
    const int size = split_tiles(num_tiles);
    return (num_tiles + size - 1) / size;
  }
};

// A pair, and the number of its first unit among all.
struct Pair {
  int seq;
  int bundle;
  int first_unit;
  int num_units;
};

__device__ __forceinline__ Pair pair_at(const Plan& plan, int seq, int bundle) {
  const int num_units = plan.starts[seq + 1] - plan.starts[seq];
  return {seq, bundle, plan.starts[seq] * plan.num_bundles + bundle * num_units, num_units};
}

// The pair that a unit belongs to.
__device__ __forceinline__ Pair pair_of(const Plan& plan, int unit) {
  const int within_bundle = unit / plan.num_bundles;  // the same for all bundles of a sequence
  int low = 0, high = plan.num_seqs;                  // starts[low] <= within_bundle < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (plan.starts[middle] <= within_bundle) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Pair first = pair_at(plan, low, 0);
  return pair_at(plan, low, (unit - first.first_unit) / first.num_units);
}

// What all segments of a pair have in common.
__device__ __forceinline__ Segment segment_of(const Plan& plan, const Pair& pair) {
  Segment segment;
  segment.seq = pair.seq;
  segment.kv_head = pair.bundle / plan.num_parts;
  segment.part = pair.bundle % plan.num_parts;
  segment.seq_len = plan.seq_lens[pair.seq];
  return segment;
}

// The segment that a block has of a pair, of which it has at least a tile.
__device__ __forceinline__ Segment balanced_segment(const Plan& plan, const Pair& pair, int block) {
  const int behind = pair.first_unit + pair.num_units;
  const int begin = max(pair.first_unit, block * plan.per_block);
  const int end = min(behind, (block + 1) * plan.per_block);
  const int first_block = pair.first_unit / plan.per_block;
  const int last_block = (behind - 1) / plan.per_block;
  Segment segment = segment_of(plan, pair);
  segment.first_tile = begin - pair.first_unit;
  segment.num_tiles = end - begin;
  segment.slot = 2 * block + (block == first_block);
  segment.first_slot = 2 * first_block + 1;
  segment.num_partials = last_block - first_block + 1;
  return segment;
}

// Where a pair's segment stands in the list: from one to the next, in the order of the tiles,
// either the pair rises by one, or the block, or both. So no two share a place, and those of a
// block stand together.
__device__ __forceinline__ int place(const Plan& plan, const Pair& pair, int block) {
  return plan.ranks[pair.seq] * plan.num_bundles + pair.bundle + block;
}

__device__ __forceinline__ void plan_balanced(const Plan& plan, BlockWork* blocks,
                                              Segment* segments, int num_blocks) {
  for (int i = threadIdx.x; i < plan.num_seqs * plan.num_bundles; i += THREADS) {
    const Pair pair = pair_at(plan, i / plan.num_bundles, i % plan.num_bundles);
    if (pair.num_units == 0) continue;
    const int block = pair.first_unit / plan.per_block;
    segments[place(plan, pair, block)] = balanced_segment(plan, pair, block);
  }
  for (int block = threadIdx.x; block < num_blocks; block += THREADS) {
    const int begin = block * plan.per_block, end = min(begin + plan.per_block, plan.total);
    if (begin >= end) continue;
    const Pair first = pair_of(plan, begin), last = pair_of(plan, end - 1);
    const int first_place = place(plan, first, block), last_place = place(plan, last, block);
    // A pair that began in another block was not listed for this one above.
    if (first.first_unit < begin) segments[first_place] = balanced_segment(plan, first, block);
    // The last one leads: others wait for it and for the first, and to merge before the whole pairs
    // are worked off costs nothing, at the end it would.
    blocks[block].lead = balanced_segment(plan, last, block);
    blocks[block].first_rest = first_place;
    blocks[block].num_rest = last_place - first_place;
  }
}

__device__ __forceinline__ Segment fixed_segment(const Plan& plan, const Pair& pair, int unit) {
  const int num_tiles = plan.tiles(pair.seq), size = plan.split_tiles(num_tiles);
  Segment segment = segment_of(plan, pair);
  segment.first_tile = (unit - pair.first_unit) * size;
  segment.num_tiles = min(size, num_tiles - segment.first_tile);
  segment.slot = unit;
  segment.first_slot = pair.first_unit;
  segment.num_partials = pair.num_units;
  return segment;
}

__device__ __forceinline__ void plan_fixed(const Plan& plan, BlockWork* blocks, Segment* segments,
                                           int num_blocks) {
  for (int i = threadIdx.x; i < plan.num_seqs * plan.num_bundles; i += THREADS) {
    const Pair pair = pair_at(plan, i / plan.num_bundles, i % plan.num_bundles);
    for (int j = 0; j < pair.num_units; ++j) {
      const int unit = pair.first_unit + j;
      segments[unit] = fixed_segment(plan, pair, unit);
    }
  }
  const int per_block = plan.total / num_blocks, more = plan.total % num_blocks;
  for (int block = threadIdx.x; block < num_blocks; block += THREADS) {
    const int begin = block * per_block + min(block, more);
    const int size = per_block + (block < more);
    if (size == 0) continue;
    blocks[block].lead = fixed_segment(plan, pair_of(plan, begin), begin);
    blocks[block].first_rest = begin + 1;
    blocks[block].num_rest = size - 1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) KERNEL_NAME(fd_plan)(
    const int* __restrict__ seq_lens,  // [num_seqs]
    BlockWork* blocks,                 // [num_blocks]
    Segment* segments,  // [num_seqs * num_bundles + num_blocks], or [splits] if they are fixed
    int* empty_seqs,    // [num_seqs]
    int* starts,        // [num_seqs + 1]
    int* ranks,         // [num_seqs]
    int* counters,      // [2 * num_blocks]; null if splits are fixed
    int num_seqs, int num_bundles, int num_parts, int num_blocks, int tile_tokens, int max_splits,
    int min_split_tiles) {
  Plan plan = {seq_lens,   starts,          ranks, num_seqs, num_bundles, num_parts, tile_tokens,
               max_splits, min_split_tiles, 0,     0};
  Sums done = {0, 0, 0};
  for (int first = 0; first < num_seqs; first += THREADS) {
    const int seq = first + threadIdx.x;
    const int units = seq < num_seqs ? plan.units(seq) : 0;
    const Scan scan = scan_block(units, units > 0);
    if (seq < num_seqs) {
      starts[seq] = done.units + scan.before.units;
      ranks[seq] = done.full + scan.before.full;
      if (units == 0) empty_seqs[seq - ranks[seq]] = seq;
    }
    done.units += scan.total.units;
    done.full += scan.total.full;
    done.longest = max(done.longest, scan.total.longest);
  }
  if (threadIdx.x == 0) starts[num_seqs] = done.units;
  const int num_empty = num_seqs - done.full;
  for (int block = threadIdx.x; block < num_blocks; block += THREADS) {
    const int per_block = num_empty / num_blocks, more = num_empty % num_blocks;
    blocks[block].first_empty = block * per_block + min(block, more);
    blocks[block].num_empty = per_block + (block < more);
    blocks[block].num_rest = blocks[block].lead.num_tiles = 0;
    if (counters != nullptr) counters[2 * block] = counters[2 * block + 1] = 0;
  }
  __syncthreads();  // starts and ranks are complete
  plan.total = done.units * num_bundles;
  if (max_splits > 0) {
    plan_fixed(plan, blocks, segments, num_blocks);
  } else {
    const int even = (plan.total + num_blocks - 1) / num_blocks;
    const int solo = done.longest <= SOLO_TILES ? done.longest : 1;
    plan.per_block = max(max(even, solo), 1);
    plan_balanced(plan, blocks, segments, num_blocks);
  }
}
