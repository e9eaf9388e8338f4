// Top-k of rows of up to 8,192 candidates: one block keeps a row in registers. Included by topk_select.cu.
//
//   1. The row is read once; its largest key.
//   2. The keys of the four octaves below that are counted in 1,024 equal buckets (all others, where fewer
//   than k lie
//      there), and the bucket kept where the count from the top passes k; and again within it, until it is
//      taken whole or holds few, which then are ranked, or is one key.
//   3. A bit per selected candidate. Prefix sums of their numbers put every entry in its place.
#ifndef HISPARSE_FFI_TOPK_WHOLE_H_
#define HISPARSE_FFI_TOPK_WHOLE_H_

#include "topk_block.h"

namespace hisparse {

template <typename Score, int kQuads>
__global__ void __launch_bounds__(kThreads, 1)
    TopkSelectWhole(const Score* __restrict__ scores, const int32_t* __restrict__ lengths,
                    int32_t* __restrict__ selected, int size, int k) {
  __shared__ int counts[1 + kTurns][kBuckets];
  __shared__ BlockScratch scratch;
  __shared__ int num_finalists, finalists[kFinalists];
  __shared__ uint32_t finalist_keys[kFinalists];
  constexpr int kMaxWords = kQuads * kThreads / 8;
  __shared__ uint32_t bits[kMaxWords], tie_bits[kMaxWords];
  const int thread = threadIdx.x;
  const int64_t row = blockIdx.x;
  selected += row * k;

  Part<Score> part = {scores + row * size, 0, 0, size, size % 4 == 0};
  float values[kQuads * 4], most = -INFINITY;
  {
    float4 quads[kQuads];
    const int any_length = lengths[row];
    part.template Fetch<kQuads>(0, quads);
#pragma unroll
    for (int turn = 0; turn < 1 + kTurns; ++turn) counts[turn][thread] = 0;
    if (thread < kMaxWords) bits[thread] = tie_bits[thread] = 0;
    if (thread == 0) num_finalists = 0;
    part.count = min(max(any_length, 0), size);
    if (part.count <= k) {
      for (int i = thread; i < k; i += kThreads) selected[i] = i < part.count ? i : -1;
      return;
    }
    part.template Take<kQuads>(0, quads, values);
  }
#pragma unroll
  for (int i = 0; i < kQuads * 4; ++i) most = fmaxf(most, values[i]);
  scratch.highest[thread / 32] = __reduce_max_sync(kAllLanes, KeyOf(most));
  __syncthreads();
  const uint32_t highest = __reduce_max_sync(kAllLanes, scratch.highest[thread % 32]);
  Range range = {highest - kWorstKey > kNear ? highest - kNear : kWorstKey, highest, k};

  float floor = FloatOf(range.low);
#pragma unroll 1
  for (int turn = 0; turn < 1 + kTurns; ++turn) {
    const int shift = ShiftOf(range);
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) {
      if (values[i] >= floor) Count(KeyOf(values[i]), range, shift, counts[turn]);
    }
    int total;
    if (Narrow(scratch, counts[turn], shift, range, &total)) {
      floor = FloatOf(range.low);
      if (range.whole || shift == 0 || scratch.inside <= kFinalists) break;
    } else {  // further down; once at most
      range = {kWorstKey, range.low - 1, range.need - total};
      floor = -INFINITY;
    }
  }
  const int inside = scratch.inside;
  const bool is_ranked = !range.whole && inside <= kFinalists;

#pragma unroll
  for (int i = 0; i < kQuads * 4; ++i) {
    if (values[i] >= floor) {
      const uint32_t key = KeyOf(values[i]);
      const int position = part.Position(0, i);
      if (range.whole || key > range.high) {
        atomicOr(bits + position / 32, 1u << position % 32);
      } else if (is_ranked) {
        const int at = atomicAdd(&num_finalists, 1);
        finalist_keys[at] = key;
        finalists[at] = position;
      } else {
        atomicOr(tie_bits + position / 32, 1u << position % 32);
      }
    }
  }
  __syncthreads();
  if (is_ranked) {
    if (thread < inside) {
      const uint32_t key = finalist_keys[thread];
      const int position = finalists[thread];
      int better = 0;
      for (int other = 0; other < inside; ++other) {
        better += finalist_keys[other] > key || (finalist_keys[other] == key && finalists[other] < position);
      }
      if (better < range.need) atomicOr(bits + position / 32, 1u << position % 32);
    }
    __syncthreads();
  } else if (!range.whole) {
    AddTies(scratch, bits, tie_bits, kMaxWords, range.need);
  }
  int total, place = thread < kMaxWords ? __popc(bits[thread]) : 0;
  place = ExclusiveSum<kWarps>(place, scratch.sums[0], &total);
  if (thread < kMaxWords) {
    for (uint32_t chosen = bits[thread]; chosen != 0; chosen &= chosen - 1) {
      selected[place++] = thread * 32 + __ffs(chosen) - 1;
    }
  }
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_TOPK_WHOLE_H_
