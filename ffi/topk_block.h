// What the two top-k kernels are made of: keys, the part of a row that a block reads, counting by buckets,
// the floor, bits.
//
// Scores become keys whose unsigned order is theirs: NaN is -inf, -0.0 is 0.0. In registers they stay floats,
// where one comparison with the floor passes over nearly all of them.
#ifndef HISPARSE_FFI_TOPK_BLOCK_H_
#define HISPARSE_FFI_TOPK_BLOCK_H_

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <climits>

#include "cuda_block.h"

namespace hisparse {

namespace cg = cooperative_groups;

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBucketBits = 10;
constexpr int kBuckets = kThreads;  // a bucket a thread
constexpr int kTurns = 4;           // of counting: 32 bits by 9 at least
constexpr int kFloorTurns = 3;
constexpr int kFinalists = 32;              // that are ranked one by one
constexpr int kFewGroupsK = 1024;           // up to here 2,048 groups a block do
constexpr uint32_t kNear = 1u << 25;        // keys of four octaves
constexpr uint32_t kWorstKey = 0x007fffff;  // of -inf; 0 is no candidate

// What the steps below share within a block.
struct BlockScratch {
  int sums[2][kWarps];
  uint32_t lowest[kWarps], highest[kWarps];
  int bucket, above, inside;  // what a count found
};

__device__ __forceinline__ uint32_t KeyOf(float score) {  // not NaN
  const uint32_t bits = __float_as_uint(score + 0.0f);    // -0.0 to 0.0
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float FloatOf(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ float4 LoadQuad(const float* scores) {
  return __ldg(reinterpret_cast<const float4*>(scores));
}
__device__ __forceinline__ float4 LoadQuad(const __nv_bfloat16* scores) {
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(scores));
  return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                     __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u));
}

// Candidates `begin ... begin + count - 1` of a row. Thread t takes the quads t, t + 1,024, ... of them.
template <typename Score>
struct Part {
  const Score* row;
  int begin, count;
  int readable;  // numbers from `begin` on that may be read; `count` of them are candidates
  bool aligned;  // a quad is one load

  __device__ __forceinline__ int Position(int first_quad, int i) const {
    return begin + ((first_quad + i / 4) * kThreads + static_cast<int>(threadIdx.x)) * 4 + i % 4;
  }

  // Past the end too, where it reads the row's first quad in vain: a branch would part the loads. Does not
  // look at `count`, which may still be on its way.
  template <int kQuads>
  __device__ __forceinline__ void Fetch(int chunk, float4 (&quads)[kQuads]) const {
    if (aligned) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int at = Position(chunk * kQuads + q, 0);
        quads[q] = LoadQuad(row + (at < begin + readable ? at : 0));
      }
    } else {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int at = Position(chunk * kQuads + q, 0), last = max(begin + readable - 1, 0);
        quads[q] = make_float4(
            static_cast<float>(row[min(at, last)]), static_cast<float>(row[min(at + 1, last)]),
            static_cast<float>(row[min(at + 2, last)]), static_cast<float>(row[min(at + 3, last)]));
      }
    }
  }

  // NaN becomes -inf; past the end stands NaN, which reaches no floor.
  template <int kQuads>
  __device__ __forceinline__ void Take(int chunk, const float4 (&quads)[kQuads],
                                       float (&values)[kQuads * 4]) const {
    const bool full = (chunk + 1) * kQuads * 4 * kThreads <= count;  // for all threads alike
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float four[4] = {quads[q].x, quads[q].y, quads[q].z, quads[q].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) values[q * 4 + i] = fmaxf(four[i], -INFINITY);
    }
    if (full) return;
#pragma unroll
    for (int i = 0; i < kQuads * 4; ++i) {
      if (Position(chunk * kQuads, i) >= begin + count) values[i] = NAN;
    }
  }

  template <int kQuads>
  __device__ __forceinline__ void Load(int chunk, float (&values)[kQuads * 4]) const {
    float4 quads[kQuads];
    Fetch<kQuads>(chunk, quads);
    Take<kQuads>(chunk, quads, values);
  }

  __device__ uint32_t KeyAt(int position) const {
    return KeyOf(fmaxf(static_cast<float>(row[position]), -INFINITY));
  }
};

// A range of keys that holds the k-th, of which `need` are still to be taken: everything above it is
// selected.
struct Range {
  uint32_t low, high;
  int need;
  bool whole;  // taken whole

  __device__ bool Holds(uint32_t key) const { return key - low <= high - low; }  // wraps below `low`
};

__device__ __forceinline__ int ShiftOf(const Range& range) {
  return max(0, 32 - kBucketBits - __clz(range.high - range.low));
}

__device__ __forceinline__ void Count(uint32_t key, const Range& range, int shift, int* counts) {
  if (range.Holds(key)) atomicAdd(&counts[(key - range.low) >> shift], 1);
}

// Narrows `range` to the bucket with the `need`-th of the keys counted, from the top; false if there are
// fewer.
__device__ __forceinline__ bool Narrow(BlockScratch& scratch, const int* counts, int shift, Range& range,
                                       int* total) {
  __syncthreads();
  const int bucket = kBuckets - 1 - static_cast<int>(threadIdx.x);
  const int inside = counts[bucket], above = ExclusiveSum<kWarps>(inside, scratch.sums[0], total);
  if (above < range.need && range.need <= above + inside) {
    scratch.bucket = bucket;
    scratch.above = above;
    scratch.inside = inside;
  }
  __syncthreads();
  if (*total < range.need) return false;
  range.low += static_cast<uint32_t>(scratch.bucket) << shift;
  range.high = range.low + min(range.high - range.low, (1u << shift) - 1u);
  range.need -= scratch.above;
  range.whole = range.need == scratch.inside;
  return true;
}

// A range of keys whose low end about k of a part's candidates reach, at least k if it has as many: of the
// maxima of 2,048 or 4,096 groups of candidates, about the k-th. `most` are those of this thread's groups.
__device__ __forceinline__ Range FindFloor(BlockScratch& scratch, int (*counts)[kBuckets],
                                           const float (&most)[4], int k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool few = k <= kFewGroupsK;
  const float groups[4] = {few ? fmaxf(most[0], most[2]) : most[0], few ? fmaxf(most[1], most[3]) : most[1],
                           few ? -INFINITY : most[2], few ? -INFINITY : most[3]};
  uint32_t keys[4], lowest = ~0u, highest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    keys[i] = groups[i] > -INFINITY ? KeyOf(groups[i]) : 0;  // 0: nothing to count
    lowest = min(lowest, keys[i] > 0 ? keys[i] : ~0u);
    highest = max(highest, keys[i]);
  }
  scratch.lowest[warp] = __reduce_min_sync(kAllLanes, lowest);
  scratch.highest[warp] = __reduce_max_sync(kAllLanes, highest);
  __syncthreads();
  highest = max(__reduce_max_sync(kAllLanes, scratch.highest[lane]), kWorstKey);
  lowest = min(__reduce_min_sync(kAllLanes, scratch.lowest[lane]), highest);
  Range range = {highest - lowest > kNear ? highest - kNear : lowest, highest, k};
  bool found = false;
#pragma unroll 1
  for (int turn = 0; turn < kFloorTurns; ++turn) {  // mostly once
    const int shift = ShiftOf(range);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (keys[i] > 0) Count(keys[i], range, shift, counts[turn]);
    }
    int total;
    found = Narrow(scratch, counts[turn], shift, range, &total);
    if (found) {
      const int reached = k - range.need + scratch.inside;
      if (reached <= k + k / 4 || shift == 0) break;
    } else {  // further down
      if (range.low == lowest) break;
      range = {lowest, range.low - 1, range.need - total};
    }
  }
  return {found ? range.low : kWorstKey, highest, k};
}

// The words of a bit field, shared out among the threads.
struct Words {
  int begin, end;

  __device__ explicit Words(int num_words) {
    const int each = (num_words + kThreads - 1) / kThreads;
    begin = min(static_cast<int>(threadIdx.x) * each, num_words);
    end = min(begin + each, num_words);
  }

  // How many bits stand before this thread's words.
  __device__ int Before(const uint32_t* bits, int* sums) const {
    int here = 0, total;
    for (int word = begin; word < end; ++word) here += __popc(bits[word]);
    return ExclusiveSum<kWarps>(here, sums, &total);
  }
};

// Calls `visit(place, bit)` for every bit that is set: how many stand before it, and its number.
template <typename Visit>
__device__ __forceinline__ void ForEachBit(const uint32_t* bits, int num_words, int* sums, Visit visit) {
  const Words mine(num_words);
  int place = mine.Before(bits, sums);
#pragma unroll 1
  for (int word = mine.begin; word < mine.end; ++word) {
#pragma unroll 1
    for (uint32_t set = bits[word]; set != 0; set &= set - 1) visit(place++, word * 32 + __ffs(set) - 1);
  }
}

// Adds the first `num_ties` of `tie_bits` to `bits`.
__device__ __forceinline__ void AddTies(BlockScratch& scratch, uint32_t* bits, const uint32_t* tie_bits,
                                        int num_words, int num_ties) {
  const Words mine(num_words);
  int ties = mine.Before(tie_bits, scratch.sums[1]);
#pragma unroll 1
  for (int word = mine.begin; word < mine.end; ++word) {
    for (uint32_t tied = tie_bits[word]; tied != 0 && ties < num_ties; tied &= tied - 1, ++ties) {
      bits[word] |= tied & -tied;
    }
  }
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_TOPK_BLOCK_H_
