// Rotary embedding of one head, in the rotate-half form: of the first 2 * half channels, channel i
// turns with channel i + half; the others pass.
//
// A thread has two runs of WIDTH channels, so that both channels of each of its pairs are its own:
// it reads both before it writes either, and the output may be the input.
#pragma once

#include "rows.cuh"

static_assert(HEAD_DIM % (2 * WIDE) == 0, "a head must be pairs of 16 bytes");

// Threads that a head takes.
template <int WIDTH>
constexpr int LANES = HEAD_DIM / 2 / WIDTH;

// Where a lane's two runs begin.
struct Channels {
  int low;
  int high;
  bool turns;
};

// Lanes below half / WIDTH have pairs that turn. The others share the channels that pass: `low`
// runs over the first half of these, `high` over the second.
template <int WIDTH>
__device__ __forceinline__ Channels channels_of(int lane, int half) {
  const int pair = lane * WIDTH;
  if (pair < half) return {pair, half + pair, true};
  return {half + pair, HEAD_DIM / 2 + pair, false};
}

template <int WIDTH>
struct Runs {
  Run<scalar_t, WIDTH> low;
  Run<scalar_t, WIDTH> high;
};

template <int WIDTH>
__device__ __forceinline__ Runs<WIDTH> load_runs(const scalar_t* head, const Channels& at) {
  return {load_run<WIDTH>(head + at.low), load_run<WIDTH>(head + at.high)};
}

template <int WIDTH>
__device__ __forceinline__ void store_runs(scalar_t* head, const Channels& at,
                                           const Runs<WIDTH>& runs) {
  store_run<WIDTH>(head + at.low, runs.low);
  store_run<WIDTH>(head + at.high, runs.high);
}

// Turns the pairs (a, b) to (a cos - b sin, b cos + a sin) in fp32, rounded once. `angles` is the
// position's row of the table: `half` cosines, then their sines.
template <int WIDTH>
__device__ __forceinline__ void turn(Runs<WIDTH>& runs, const Channels& at,
                                     const float* __restrict__ angles, int half) {
  if (!at.turns) return;
  const Run<float, WIDTH> cosines = load_run<WIDTH>(angles + at.low);
  const Run<float, WIDTH> sines = load_run<WIDTH>(angles + half + at.low);
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    const float a = to_float(runs.low.values[e]);
    const float b = to_float(runs.high.values[e]);
    const float cosine = cosines.values[e];
    const float sine = sines.values[e];
    // Fused on purpose, and in words: left to the compiler, each kernel could fuse otherwise.
    runs.low.values[e] = from_float<scalar_t>(fmaf(a, cosine, -(b * sine)));
    runs.high.values[e] = from_float<scalar_t>(fmaf(b, cosine, a * sine));
  }
}

// Whether angles can be read 16 bytes at once, and no run has channels that turn and that pass.
__device__ __forceinline__ bool angles_are_aligned(const float* table, int64_t stride, int half) {
  return is_aligned(table, stride) && half % WIDE == 0;
}
