// Top-k of rows of up to 8,192 candidates: one block keeps a row in registers.
//
//   1. The row is read once; its largest key.
//   2. The keys of the four octaves below that are counted in 1,024 equal buckets (all others, where fewer
//      than k lie there), and the bucket kept where the count from the top passes k; and again within it,
//      until it is taken whole or holds few, or is one key. Of few, a warp each finds its rank.
//   3. A bit for each of a thread's candidates that is selected. Prefix sums of their numbers put every
//      entry in its place: a thread holds four neighbours in every quad.
#ifndef HISPARSE_FFI_TOPK_WHOLE_H_
#define HISPARSE_FFI_TOPK_WHOLE_H_

#include "topk_block.h"

namespace hisparse {

// How many of a thread's bits, four a quad, stand in its first quad, and 2^16 times those in its second.
__device__ __forceinline__ int InQuads(uint32_t bits) {
  return __popc(bits & 0xf) | __popc(bits & 0xf0) << 16;
}

// The lowest `count` of `bits`; none where it is not positive.
__device__ __forceinline__ uint32_t LowestOf(uint32_t bits, int count) {
  uint32_t lowest = 0;
  for (; bits != 0 && count > 0; bits &= bits - 1, --count) lowest |= bits & -bits;
  return lowest;
}

template <typename Score, int kQuads>
__global__ void __launch_bounds__(kThreads, 1)
    TopkSelectWhole(const Score* __restrict__ scores, const int32_t* __restrict__ lengths,
                    int32_t* __restrict__ selected, int size, int k) {
  static_assert(kQuads <= 2 && kFinalists <= kWarps);
  __shared__ int counts[1 + kTurns][kBuckets];
  __shared__ BlockScratch scratch;
  __shared__ int num_finalists, finalists[kFinalists];
  __shared__ uint32_t finalist_keys[kFinalists];
  __shared__ bool is_kept[kFinalists];
  constexpr int kEach = kQuads * 4;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t row = blockIdx.x;
  selected += row * k;

  Part<Score> part = {scores + row * size, 0, 0, size, size % 4 == 0};
  uint32_t keys[kEach], most = kWorstKey;
  {
    float4 quads[kQuads];
    float values[kEach];
    const int any_length = lengths[row];
    part.template Fetch<kQuads>(0, quads);
#pragma unroll
    for (int turn = 0; turn < 1 + kTurns; ++turn) counts[turn][thread] = 0;
    if (thread == 0) num_finalists = 0;
    part.count = min(max(any_length, 0), size);
    if (part.count <= k) {
      for (int i = thread; i < k; i += kThreads) selected[i] = i < part.count ? i : -1;
      return;
    }
    part.template Take<kQuads>(0, quads, values);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      keys[i] = values[i] == values[i] ? KeyOf(values[i]) : 0;  // 0: past the end
      most = max(most, keys[i]);
    }
  }
  scratch.highest[warp] = __reduce_max_sync(kAllLanes, most);
  __syncthreads();
  const uint32_t highest = __reduce_max_sync(kAllLanes, scratch.highest[lane]);
  Range range = {highest - kWorstKey > kNear ? highest - kNear : kWorstKey, highest, k};

#pragma unroll 1
  for (int turn = 0; turn < 1 + kTurns; ++turn) {
    const int shift = ShiftOf(range);
#pragma unroll
    for (int i = 0; i < kEach; ++i) Count(keys[i], range, shift, counts[turn]);
    int total;
    if (Narrow(scratch, counts[turn], shift, range, &total)) {
      if (range.whole || shift == 0 || scratch.inside <= kFinalists) break;
    } else {  // further down; once at most
      range = {kWorstKey, range.low - 1, range.need - total};
    }
  }

  const int inside = scratch.inside;
  const uint32_t sure_from = range.whole ? range.low : range.high + 1;
  uint32_t chosen = 0, open = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    chosen |= static_cast<uint32_t>(keys[i] >= sure_from) << i;
    open |= static_cast<uint32_t>(keys[i] >= range.low) << i;
  }
  open &= ~chosen;
  if (!range.whole && inside <= kFinalists) {
    const int first = open ? atomicAdd(&num_finalists, __popc(open)) : 0;
    int at = first;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (open >> i & 1) {
        finalist_keys[at] = keys[i];
        finalists[at++] = part.Position(0, i);
      }
    }
    __syncthreads();
    if (warp < inside) {
      const uint32_t key = finalist_keys[warp], their = lane < inside ? finalist_keys[lane] : 0;
      const bool is_better =
          their > key || (lane < inside && their == key && finalists[lane] < finalists[warp]);
      const int better = __popc(__ballot_sync(kAllLanes, is_better));
      if (lane == 0) is_kept[warp] = better < range.need;
    }
    __syncthreads();
    at = first;
    for (uint32_t mine = open; mine != 0; mine &= mine - 1, ++at) {
      if (is_kept[at]) chosen |= mine & -mine;
    }
  } else if (!range.whole) {  // equal scores: those that stand first
    int total;
    const int before = ExclusiveSum<kWarps>(InQuads(open), scratch.sums[1], &total);
    chosen |= LowestOf(open & 0xf, range.need - (before & 0xffff));
    chosen |= LowestOf(open & 0xf0, range.need - (total & 0xffff) - (before >> 16));
  }
  int total;
  const int before = ExclusiveSum<kWarps>(InQuads(chosen), scratch.sums[0], &total);
  int place[2] = {before & 0xffff, (total & 0xffff) + (before >> 16)};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (chosen >> i & 1) selected[place[i / 4]++] = part.Position(0, i);
  }
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_TOPK_WHOLE_H_
