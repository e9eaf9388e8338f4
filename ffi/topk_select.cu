// The k best entries of each row of scores, as ascending entry numbers. Reference: pallas_kernels/ref.py.
//
// One block, or a cluster of blocks that shares its shared memory, takes one row and reads it once, into
// registers (rows beyond 32,768 candidates a block are read again in every pass):
//
//   1. Scores become keys whose unsigned order is theirs; NaN is -inf, -0.0 is 0.0. Key 0 means no candidate.
//   2. A floor: of the maxima of 2,048 groups of candidates a block, the k-th largest. At least k keys reach
//   it; of
//      random scores few more do, so the counting below skips nearly everything.
//   3. The k-th key lies in [low, high]. Count the keys of that range in 1,024 equal buckets, keep the bucket
//   where the
//      count from the top passes k, and again within it, until it is taken whole or is a single key: at most
//      four times.
//   4. One bit per candidate for the keys above, one for the ties. Prefix sums of their numbers put every
//   selected
//      entry in its place.
//
// Counts and bits do not depend on the order of their updates, so the result depends on the inputs alone.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <climits>

#include "cuda_block.h"

namespace hisparse {
namespace {

namespace cg = cooperative_groups;

constexpr int kBuckets = kThreads;  // a bucket a thread
constexpr int kBucketBits = 10;
constexpr int kTurns = 5;  // the floor, and 32 bits by 10 at a time
constexpr int kMaxCtas = 8;

struct Shared {
  int counts[kTurns][kBuckets];  // a turn has its own: another block may still read the last one's
  int scratch[kWarps];
  uint32_t lowest[kWarps], highest[kWarps];
  uint32_t low, high;         // of the group maxima of this block
  int bucket, above, inside;  // what a turn found
  int sure[kMaxCtas];         // selected above the ties, by block of the cluster
  int ties[kMaxCtas];
};

__device__ __forceinline__ uint32_t KeyOf(float score) {
  const float ordered = score >= -INFINITY ? score + 0.0f : -INFINITY;  // -0.0 to 0.0, NaN to -inf
  const uint32_t bits = __float_as_uint(ordered);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float4 LoadQuad(const float* scores) {
  return __ldg(reinterpret_cast<const float4*>(scores));
}
__device__ __forceinline__ float4 LoadQuad(const __nv_bfloat16* scores) {
  const uint2 bits = __ldg(reinterpret_cast<const uint2*>(scores));
  return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                     __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u));
}

// The candidates of one block: thread t has the quads t, t + 1,024, ... of them.
template <typename Score, int kQuads>
struct Candidates {
  const Score* row;     // of the whole row
  const Score* scores;  // of this block's part
  int count;
  bool aligned;  // a quad is one load
  uint32_t keys[kQuads > 0 ? kQuads * 4 : 1];

  // Past the end too, where it reads the row's first quad in vain: a branch would part the loads.
  __device__ __forceinline__ float4 ReadAligned(int first) const {
    return LoadQuad(first < count ? scores + first : row);
  }

  __device__ __forceinline__ float4 ReadUnaligned(int first) const {
    const int last = max(count - 1, 0);
    const Score* from = count > 0 ? scores : row;
    return make_float4(
        static_cast<float>(from[min(first, last)]), static_cast<float>(from[min(first + 1, last)]),
        static_cast<float>(from[min(first + 2, last)]), static_cast<float>(from[min(first + 3, last)]));
  }

  static __device__ __forceinline__ void KeysOf(float4 quad, int num_valid, uint32_t* keys) {
    keys[0] = num_valid > 0 ? KeyOf(quad.x) : 0;
    keys[1] = num_valid > 1 ? KeyOf(quad.y) : 0;
    keys[2] = num_valid > 2 ? KeyOf(quad.z) : 0;
    keys[3] = num_valid > 3 ? KeyOf(quad.w) : 0;
  }

  __device__ __forceinline__ void Load() {
    if constexpr (kQuads > 0) {
      float4 quads[kQuads];  // every load is under way before the first is used
      if (aligned) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) quads[q] = ReadAligned((q * kThreads + threadIdx.x) * 4);
      } else {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) quads[q] = ReadUnaligned((q * kThreads + threadIdx.x) * 4);
      }
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        KeysOf(quads[q], count - (q * kThreads + static_cast<int>(threadIdx.x)) * 4, keys + q * 4);
      }
    }
  }

  // Calls `visit(key, position, quad)` for each candidate of this thread, and for keys 0 past the last one.
  template <typename Visit>
  __device__ __forceinline__ void ForEach(Visit visit) const {
    if constexpr (kQuads > 0) {
#pragma unroll
      for (int i = 0; i < kQuads * 4; ++i) {
        visit(keys[i], (i / 4 * kThreads + static_cast<int>(threadIdx.x)) * 4 + i % 4, i / 4);
      }
    } else {
      int quad = 0;
      for (int first = threadIdx.x * 4; first < count; first += kThreads * 4, ++quad) {
        uint32_t few[4];
        KeysOf(aligned ? ReadAligned(first) : ReadUnaligned(first), count - first, few);
#pragma unroll
        for (int i = 0; i < 4; ++i) visit(few[i], first + i, quad);
      }
    }
  }
};

template <bool kCluster>
struct Row {  // the blocks of one row
  __device__ static int Rank() { return kCluster ? static_cast<int>(cg::this_cluster().block_rank()) : 0; }
  __device__ static int Size() { return kCluster ? static_cast<int>(cg::this_cluster().num_blocks()) : 1; }
  __device__ static void Sync() {
    if constexpr (kCluster) {
      cg::this_cluster().sync();
    } else {
      __syncthreads();
    }
  }
  template <typename T>
  __device__ static T* Of(T* shared, int rank) {
    if constexpr (kCluster) {
      return cg::this_cluster().map_shared_rank(shared, rank);
    } else {
      return shared;
    }
  }
};

// A range of keys that holds the k-th, of which `need` are still to be taken: everything above it is
// selected.
struct Range {
  uint32_t low, high;
  int need;
  bool done;  // taken whole, or one key
  bool whole;
};

__device__ __forceinline__ int ShiftOf(const Range& range) {
  return max(0, 32 - kBucketBits - __clz(range.high - range.low));
}

__device__ __forceinline__ void Count(uint32_t key, const Range& range, int shift, int* counts) {
  const uint32_t offset = key - range.low;  // wraps below `low`
  if (offset <= range.high - range.low) atomicAdd(&counts[offset >> shift], 1);
}

// Narrows `range` to the bucket with the `need`-th of the keys counted, from the top; false if there are
// fewer.
template <bool kCluster>
__device__ __forceinline__ bool Narrow(Shared& shared, int* counts, int shift, Range& range) {
  Row<kCluster>::Sync();
  const int bucket = kBuckets - 1 - static_cast<int>(threadIdx.x);
  int inside = 0, total;
  for (int rank = 0; rank < Row<kCluster>::Size(); ++rank) inside += Row<kCluster>::Of(counts, rank)[bucket];
  const int above = ExclusiveSum(inside, shared.scratch, &total);
  if (above < range.need && range.need <= above + inside) {
    shared.bucket = bucket;
    shared.above = above;
    shared.inside = inside;
  }
  __syncthreads();
  if (total < range.need) return false;
  range.low += static_cast<uint32_t>(shared.bucket) << shift;
  range.high = range.low + min(range.high - range.low, (1u << shift) - 1u);
  range.need -= shared.above;
  range.whole = range.need == shared.inside;
  range.done = range.whole || shift == 0;
  return true;
}

template <typename Score, int kQuads, bool kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    TopkSelectKernel(const Score* __restrict__ scores, const int32_t* __restrict__ lengths,
                     int32_t* __restrict__ selected, int size, int k) {
  __shared__ Shared shared;
  extern __shared__ uint32_t bits[];  // a bit per candidate above the ties, then one per tie
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = Row<kCluster>::Rank(), num_blocks = Row<kCluster>::Size();
  const int64_t row = blockIdx.x / num_blocks;
  const int length = min(max(lengths[row], 0), size);
  selected += row * k;
  if (length <= k) {  // the same in every block of the row
    if (rank == 0) {
      for (int i = thread; i < k; i += kThreads) selected[i] = i < length ? i : -1;
    }
    return;
  }

  const int span = ((length + num_blocks - 1) / num_blocks + 31) / 32 * 32;
  const int begin = min(rank * span, length);
  const int num_words = span / 32;
  Candidates<Score, kQuads> candidates;
  candidates.row = scores + row * size;
  candidates.scores = candidates.row + begin;
  candidates.count = min(span, length - begin);
  candidates.aligned = size % 4 == 0 && begin % 4 == 0;
  candidates.Load();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) shared.counts[turn][thread] = 0;
  for (int i = thread; i < 2 * num_words; i += kThreads) bits[i] = 0;

  uint32_t even = 0, odd = 0;  // this thread's two groups
  candidates.ForEach([&](uint32_t key, int, int quad) {
    if (quad % 2 == 0) {
      even = max(even, key);
    } else {
      odd = max(odd, key);
    }
  });
  {
    const uint32_t lowest = min(even ? even : ~0u, odd ? odd : ~0u);
    shared.lowest[warp] = __reduce_min_sync(kAllLanes, lowest);
    shared.highest[warp] = __reduce_max_sync(kAllLanes, max(even, odd));
  }
  __syncthreads();
  Range range = {__reduce_min_sync(kAllLanes, shared.lowest[lane]),
                 __reduce_max_sync(kAllLanes, shared.highest[lane]), k, false, false};
  if constexpr (kCluster) {
    if (thread == 0) {
      shared.low = range.low;
      shared.high = range.high;
    }
    Row<kCluster>::Sync();
    const int other = min(lane, num_blocks - 1);
    range.low = __reduce_min_sync(kAllLanes, Row<kCluster>::Of(&shared, other)->low);
    range.high = __reduce_max_sync(kAllLanes, Row<kCluster>::Of(&shared, other)->high);
  }
  const uint32_t highest = range.high;

  int shift = ShiftOf(range);
  Count(even, range, shift, shared.counts[0]);
  Count(odd, range, shift, shared.counts[0]);
  const bool has_floor = Narrow<kCluster>(shared, shared.counts[0], shift, range);
  range = {has_floor ? range.low : 1u, highest, k, false, false};

  for (int turn = 1; turn < kTurns && !range.done; ++turn) {
    shift = ShiftOf(range);
    candidates.ForEach([&](uint32_t key, int, int) { Count(key, range, shift, shared.counts[turn]); });
    Narrow<kCluster>(shared, shared.counts[turn], shift, range);
  }

  uint32_t* tie_bits = bits + num_words;
  const uint32_t sure_from = range.whole ? range.low : range.low + 1;
  const int num_ties = range.whole ? 0 : range.need;  // how many of them are selected
  candidates.ForEach([&](uint32_t key, int position, int) {
    if (key >= range.low) atomicOr((key >= sure_from ? bits : tie_bits) + position / 32, 1u << position % 32);
  });
  __syncthreads();

  const int words_each = (num_words + kThreads - 1) / kThreads;
  const int first_word = min(thread * words_each, num_words),
            last_word = min(first_word + words_each, num_words);
  int sure = 0, ties = 0;
  for (int word = first_word; word < last_word; ++word) {
    sure += __popc(bits[word]);
    ties += __popc(tie_bits[word]);
  }
  int sure_total, ties_total = 0;
  sure = ExclusiveSum(sure, shared.scratch, &sure_total);
  if (num_ties > 0) {
    __syncthreads();
    ties = ExclusiveSum(ties, shared.scratch, &ties_total);
  }
  if constexpr (kCluster) {
    if (thread < num_blocks) {
      Shared* other = Row<kCluster>::Of(&shared, thread);
      other->sure[rank] = sure_total;
      other->ties[rank] = ties_total;
    }
    Row<kCluster>::Sync();  // also keeps every block here until the others have read its counts
    for (int before = 0; before < rank; ++before) {
      sure += shared.sure[before];
      ties += shared.ties[before];
    }
  }
  for (int word = first_word; word < last_word; ++word) {
    uint32_t chosen = bits[word], tied = tie_bits[word];
    int place = sure + min(ties, num_ties);
    sure += __popc(chosen);
    for (; tied != 0; tied &= tied - 1) {
      if (ties++ < num_ties) chosen |= tied & -tied;
    }
    for (; chosen != 0; chosen &= chosen - 1) selected[place++] = begin + word * 32 + __ffs(chosen) - 1;
  }
}

struct Arguments {
  cudaStream_t stream;
  int ordinal;
  const void* scores;
  const int32_t* lengths;
  int32_t* selected;
  int num_rows, size, k, num_ctas;
};

template <typename Score, int kQuads>
ffi::Error LaunchTopkSelect(const Arguments& a) {
  const int span = (a.size + a.num_ctas - 1) / a.num_ctas + 31;
  const size_t shared_bytes = static_cast<size_t>(span / 32) * 2 * sizeof(uint32_t);
  auto* kernel =
      a.num_ctas > 1 ? &TopkSelectKernel<Score, kQuads, true> : &TopkSelectKernel<Score, kQuads, false>;
  return Launch("topk_select", a.stream, a.ordinal, a.num_rows * a.num_ctas, a.num_ctas, shared_bytes, kernel,
                static_cast<const Score*>(a.scores), a.lengths, a.selected, a.size, a.k);
}

template <typename Score>
ffi::Error LaunchTopkSelectOf(const Arguments& a) {
  const int span = ((a.size + a.num_ctas - 1) / a.num_ctas + 31) / 32 * 32;
  switch ((span + 4 * kThreads - 1) / (4 * kThreads)) {
    case 0:
    case 1:
      return LaunchTopkSelect<Score, 1>(a);
    case 2:
      return LaunchTopkSelect<Score, 2>(a);
    case 3:
    case 4:
      return LaunchTopkSelect<Score, 4>(a);
    case 5:
    case 6:
    case 7:
    case 8:
      return LaunchTopkSelect<Score, 8>(a);
    default:
      return LaunchTopkSelect<Score, 0>(a);
  }
}

ffi::Error TopkSelect(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer scores,
                      ffi::Buffer<ffi::S32, 1> lengths, ffi::ResultBuffer<ffi::S32, 2> selected,
                      int64_t ctas_per_row) {
  if (scores.dimensions().size() != 2 ||
      scores.dimensions()[0] != static_cast<int64_t>(lengths.element_count()) ||
      selected->dimensions()[0] != scores.dimensions()[0]) {
    return ffi::Error::InvalidArgument(
        "topk_select: scores are [rows, N], lengths [rows], selected [rows, k]");
  }
  const int64_t num_rows = scores.dimensions()[0], size = scores.dimensions()[1],
                k = selected->dimensions()[1];
  if (ctas_per_row < 1 || ctas_per_row > kMaxCtas) {
    return ffi::Error::InvalidArgument("topk_select: ctas_per_row=" + std::to_string(ctas_per_row) +
                                       " is outside 1.." + std::to_string(kMaxCtas));
  }
  constexpr int64_t kMaxSpan = 512 * 1024;  // two bits a candidate in shared memory
  if (size > kMaxSpan * ctas_per_row || num_rows * ctas_per_row > INT_MAX) {
    return ffi::Error::InvalidArgument("topk_select: [" + std::to_string(num_rows) + ", " +
                                       std::to_string(size) +
                                       "] is too large for ctas_per_row=" + std::to_string(ctas_per_row) +
                                       ", which takes rows of " + std::to_string(kMaxSpan * ctas_per_row));
  }
  if (num_rows == 0 || k == 0) return ffi::Error::Success();
  const Arguments arguments = {stream,
                               ordinal,
                               scores.untyped_data(),
                               lengths.typed_data(),
                               selected->typed_data(),
                               static_cast<int>(num_rows),
                               static_cast<int>(size),
                               static_cast<int>(k),
                               static_cast<int>(ctas_per_row)};
  switch (scores.element_type()) {
    case ffi::F32:
      return LaunchTopkSelectOf<float>(arguments);
    case ffi::BF16:
      return LaunchTopkSelectOf<__nv_bfloat16>(arguments);
    default:
      return ffi::Error::InvalidArgument("topk_select: scores must be f32 or bf16");
  }
}

auto BindTopkSelect() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()            // scores f32 or bf16 [rows, N]
      .Arg<ffi::Buffer<ffi::S32, 1>>()  // lengths i32[rows]
      .Ret<ffi::Buffer<ffi::S32, 2>>()  // selected i32[rows, k]
      .Attr<int64_t>("ctas_per_row");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_topk_select_cuda, TopkSelect, BindTopkSelect(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
