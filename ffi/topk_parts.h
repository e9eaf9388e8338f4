// Top-k of rows longer than one block keeps, or that several blocks share: a cluster of 1 to 8.
//
//   1. A block reads its part, in chunks; a floor (topk_block.h), which about k candidates reach.
//   2. It reads the part again and lists those in shared memory. Too many (most scores equal, say): the
//      list becomes exactly the k best of the part, at the price of reading it again some times.
//   3. The first block of the cluster collects the lists. It counts the keys in 1,024 equal buckets and keeps
//      the bucket where the count from the top passes k, until that is taken whole or holds few, which then
//      are ranked.
//   4. A bit per selected candidate. Prefix sums of their numbers put every entry in its place.
//
// The order of a list depends on timing; counts, ranks and bits do not.
#ifndef HISPARSE_FFI_TOPK_PARTS_H_
#define HISPARSE_FFI_TOPK_PARTS_H_

#include "cuda_memory.h"
#include "topk_block.h"

namespace hisparse {

// The `range.need` best of a part, read again in every pass: at most four counts, then a bit per candidate
// above the k-th and one per tie. Calls `emit(place, position)` for each. The part starts at a multiple of
// 32; bits are zero at first.
template <typename Score, typename Emit>
__device__ __noinline__ void SelectExactly(const Part<Score> part, Range range, BlockScratch& scratch,
                                           int* counts, uint32_t* bits, uint32_t* tie_bits, Emit emit) {
  const auto for_each = [&](auto visit) {
#pragma unroll 1
    for (int first = threadIdx.x * 4, chunk = 0; first < part.count; first += kThreads * 4, ++chunk) {
      float values[4];
      part.template Load<1>(chunk, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < part.count) visit(KeyOf(values[i]), first + i);
      }
    }
  };
  for (int shift = 32; !range.whole && shift > 0;) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) counts[i] = 0;
    __syncthreads();
    shift = ShiftOf(range);
    for_each([&](uint32_t key, int) { Count(key, range, shift, counts); });
    int total;
    Narrow(scratch, counts, shift, range, &total);
  }
  const uint32_t sure_from = range.whole ? range.low : range.low + 1;
  for_each([&](uint32_t key, int at) {
    if (key >= range.low) atomicOr((key >= sure_from ? bits : tie_bits) + at / 32, 1u << at % 32);
  });
  __syncthreads();
  const int num_words = (part.count + 31) / 32;
  if (!range.whole) AddTies(scratch, bits, tie_bits, num_words, range.need);
  ForEachBit(bits, num_words, scratch.sums[0], [&](int place, int at) { emit(place, part.begin + at); });
}

constexpr size_t kMostShared = 200 * 1024;
constexpr size_t kItemBytes = 2 * sizeof(uint32_t);  // of a list

// Of the two bit fields of a row.
inline size_t BitsBytes(int size) { return (static_cast<size_t>(size) + 31) / 32 * 2 * sizeof(uint32_t); }

// Twice k, so that it holds what reaches the floor of random scores; 0 where k is too large for any list,
// which a block alone can do without.
inline int ListSize(int k, int num_ctas, size_t bits_bytes) {
  const int fits = static_cast<int>((kMostShared - bits_bytes) / (kItemBytes * num_ctas)) / 4 * 4;
  return fits < k ? 0 : std::min((std::max(2 * k, 1024) + 3) / 4 * 4, fits);
}

struct PartsShared {
  int counts[kFloorTurns + kTurns][kBuckets];  // the floor's, the list's
  BlockScratch scratch;
  uint32_t floor, most;  // keys of this block lie between
  int num_listed;
  int num_offered;  // to the first block of the cluster
  int num_finalists;
  uint32_t finalist_keys[kFinalists];
  int finalists[kFinalists];
};

template <typename Score, int kQuads>
__global__ void __launch_bounds__(kThreads, 1)
    TopkSelectParts(const Score* __restrict__ scores, const int32_t* __restrict__ lengths,
                    int32_t* __restrict__ selected, int size, int k, int list_size) {
  __shared__ PartsShared shared;
  auto* const dynamic = reinterpret_cast<uint32_t*>(SharedMemory());
  const int thread = threadIdx.x, lane = thread % 32;
  const cg::cluster_group cluster = cg::this_cluster();
  const int num_blocks = static_cast<int>(cluster.num_blocks()),
            rank = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x / num_blocks;
  selected += row * k;
  uint32_t* listed_keys = dynamic;  // room for the lists of all blocks of the cluster
  int* listed = reinterpret_cast<int*>(listed_keys + list_size * num_blocks);
  auto* bits = reinterpret_cast<uint32_t*>(listed + list_size * num_blocks);  // of the row
  const int row_words = (size + 31) / 32;
  uint32_t* tie_bits = bits + row_words;

  // 1. Read; the floor.
  constexpr int kEach = kQuads * 4, kChunk = kEach * kThreads;
  const int span = ((size + num_blocks - 1) / num_blocks + 31) / 32 * 32;
  const int begin = min(rank * span, size);
  Part<Score> part = {scores + row * size, begin, 0, min(span, size - begin),
                      size % 4 == 0 && begin % 4 == 0};
  float values[kEach], most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  float4 quads[kQuads];
  const int any_length = lengths[row];
  part.template Fetch<kQuads>(0, quads);
#pragma unroll 1
  for (int i = thread; i < (kFloorTurns + kTurns) * kBuckets / 4; i += kThreads) {
    reinterpret_cast<int4*>(shared.counts)[i] = {0, 0, 0, 0};
  }
#pragma unroll 1
  for (int i = thread; i < 2 * row_words; i += kThreads) bits[i] = 0;
  if (thread == 0) shared.num_listed = shared.num_finalists = 0;
  const int length = min(max(any_length, 0), size);
  if (length <= k) {  // the same in every block of the row
    if (rank == 0) {
#pragma unroll 1
      for (int i = thread; i < k; i += kThreads) selected[i] = i < length ? i : -1;
    }
    return;
  }
  part.count = min(span, max(length - begin, 0));
  part.template Take<kQuads>(0, quads, values);
  const int num_chunks = max(1, (part.count + kChunk - 1) / kChunk);
  for (int chunk = 0;;) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) most[i % 4] = fmaxf(most[i % 4], values[i]);
    if (++chunk >= num_chunks) break;
    part.template Load<kQuads>(chunk, values);
  }
  Range range = FindFloor(shared.scratch, shared.counts, most, k);

  // 2. List what reaches the floor; the last chunk first, which is nearest.
  const float floor = FloatOf(range.low);
  for (int chunk = num_chunks - 1;;) {
#pragma unroll
    for (int half = 0; half < kEach; half += 32) {
      uint32_t reach = 0;
#pragma unroll
      for (int i = 0; i < min(kEach, 32); ++i) reach |= static_cast<uint32_t>(values[half + i] >= floor) << i;
      if (!__any_sync(kAllLanes, reach)) continue;
      const int here = __popc(reach), up_to = LaneSum(here);
      int at = lane == 31 ? atomicAdd(&shared.num_listed, up_to) : 0;
      at = __shfl_sync(kAllLanes, at, 31) + up_to - here;
#pragma unroll 1
      for (; reach != 0; reach &= reach - 1, ++at) {
        if (at < list_size) listed[at] = part.Position(chunk * kQuads, half + __ffs(reach) - 1);
      }
    }
    if (--chunk < 0) break;
    part.template Load<kQuads>(chunk, values);
  }
  __syncthreads();
  int num_listed = shared.num_listed;
  if (num_listed > list_size) {
    const bool alone = num_blocks == 1;
    SelectExactly(part, range, shared.scratch, shared.counts[kFloorTurns], bits, tie_bits,
                  [&](int place, int position) { (alone ? selected : listed)[place] = position; });
    if (alone) return;
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < 2 * row_words; i += kThreads) bits[i] = 0;
#pragma unroll 1
    for (int i = thread; i < kBuckets; i += kThreads) shared.counts[kFloorTurns][i] = 0;
    __syncthreads();
    num_listed = k;
  }
#pragma unroll 1
  for (int i = thread; i < num_listed; i += kThreads) listed_keys[i] = part.KeyAt(listed[i]);

  // 3. Select among those listed.
  if (num_blocks > 1) {
    if (thread == 0) {
      shared.floor = range.low;
      shared.most = range.high;
      shared.num_offered = num_listed;
    }
    cluster.sync();
    if (rank == 0) {
      for (int other = 1; other < num_blocks; ++other) {
        const PartsShared* theirs = cluster.map_shared_rank(&shared, other);
        const uint32_t* their_keys = cluster.map_shared_rank(listed_keys, other);
        const int *their_list = cluster.map_shared_rank(listed, other), count = theirs->num_offered;
        range.low = min(range.low, theirs->floor);
        range.high = max(range.high, theirs->most);
#pragma unroll 1
        for (int i = thread; i < count; i += kThreads) {
          listed_keys[num_listed + i] = their_keys[i];
          listed[num_listed + i] = their_list[i];
        }
        num_listed += count;
      }
    }
    cluster.sync();  // no block leaves before its list is read
    if (rank != 0) return;
  }
  int inside = num_listed;
  range.whole = num_listed <= k;
  for (int turn = kFloorTurns; !range.whole && turn < kFloorTurns + kTurns; ++turn) {
    const int shift = ShiftOf(range);
#pragma unroll 1
    for (int i = thread; i < num_listed; i += kThreads)
      Count(listed_keys[i], range, shift, shared.counts[turn]);
    int total;
    Narrow(shared.scratch, shared.counts[turn], shift, range, &total);
    inside = shared.scratch.inside;
    if (shift == 0 || inside <= kFinalists) break;
  }
  const bool is_ranked = !range.whole && inside <= kFinalists;
  if (is_ranked) {
#pragma unroll 1
    for (int i = thread; i < num_listed; i += kThreads) {
      if (range.Holds(listed_keys[i])) {
        const int at = atomicAdd(&shared.num_finalists, 1);
        shared.finalist_keys[at] = listed_keys[i];
        shared.finalists[at] = listed[i];
      }
    }
    __syncthreads();
  }

  // 4. Bits, and from them the places.
#pragma unroll 1
  for (int i = thread; i < num_listed; i += kThreads) {
    const uint32_t key = listed_keys[i];
    const int position = listed[i];
    if (key < range.low) continue;
    bool is_tie = false;
    if (!range.whole && range.Holds(key)) {
      is_tie = !is_ranked;
      int better = 0;
      for (int other = 0; is_ranked && other < inside; ++other) {
        const uint32_t their = shared.finalist_keys[other];
        better += their > key || (their == key && shared.finalists[other] < position);
      }
      if (is_ranked && better >= range.need) continue;
    }
    atomicOr((is_tie ? tie_bits : bits) + position / 32, 1u << position % 32);
  }
  __syncthreads();
  const int num_words = (length + 31) / 32;
  if (!range.whole && !is_ranked) AddTies(shared.scratch, bits, tie_bits, num_words, range.need);
  ForEachBit(bits, num_words, shared.scratch.sums[0], [&](int place, int at) { selected[place] = at; });
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_TOPK_PARTS_H_
