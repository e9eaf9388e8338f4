// Attention of decode over fp8 entry rows: one softmax over a request's sliding window, selected rows of the
// paged cache, and a sink for each head. Keys are values. Reference: pallas_kernels/ref.py.
//
// A block, two warpgroups, has 64 heads of one query in shared memory and takes 64 keys at a time: their
// bytes are on their way two tiles ahead, and are turned into bf16 once, while the last tile is multiplied.
// Each warpgroup has the scores over half of the channels, of which it gives those with half of the keys to
// the other, and the sums over its half of the channels. The blocks of a cluster share the tiles of one query
// and put their sums together at the end, each for its own channels. Nothing depends on which block is done
// first.
#ifndef HISPARSE_FFI_ATTEND_KERNEL_H_
#define HISPARSE_FFI_ATTEND_KERNEL_H_

#include "cuda_block.h"
#include "cuda_warpgroups.h"

namespace hisparse::attention {

namespace cg = cooperative_groups;

constexpr int kWarpgroup = 128, kThreads = 2 * kWarpgroup;
constexpr int kHeads = 64, kKeys = 64;  // of a block, of a tile
constexpr int kChannels = 512, kNope = 448, kBlocks = kChannels / kBlockColumns;
constexpr int kValueBytes = 576, kScaleBytes = 8, kRowBytes = kValueBytes + kScaleBytes;
constexpr int kWord = 16;                                // bytes of an access to shared memory
constexpr int kWordsOfKey = kChannels * 2 / kWord;       // as bf16
constexpr int kWordsOfThread = kValueBytes / kWord / 4;  // of a row's values: four threads have a row
constexpr int kNopeWordsOfThread = kNope / kWord / 4;    // of which e4m3
constexpr int kMostCluster = 8;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kSlack =
    8.0f;  // by which scores may exceed what they are taken relative to, as powers of two

struct Attending {
  const uint4* queries;      // bf16 [R, T, H, 512]
  const uint8_t* window;     // [R, W, 584]
  const int32_t* positions;  // [R, T]
  const uint8_t* slab;
  const int32_t* rows;     // [R, T, K]
  const int32_t* lengths;  // [R, T]
  const float* sink;       // [H]
  uint32_t* out;           // pairs of bf16, as the queries
  int64_t stride, offset, scales_offset;
  int num_blocks, num_heads, query_rows, ring_rows, window_width, columns, page_entries, row_step;
  float scale;  // of scores, for powers of two
};

// A row's bytes on their way, in places that only the thread that fetches them reads.
struct Raw {
  uint4 values[kWordsOfThread][kThreads];
  uint2 scales[kThreads];
};

struct Shared {
  union {
    uint4 queries[kBlocks][kHeads * kBlockWords];
    struct {  // at the end: what each block of the cluster found, and its share in the result
      float tops[kMostCluster][kHeads], totals[kMostCluster][kHeads], shares[kMostCluster][kHeads];
    } of_cluster;
  };
  union {
    struct {
      uint4 keys[kBlocks][kKeys * kBlockWords];
      Raw raw[2];
    };
    float2 sums[kHeads][kChannels / 2];  // at the end
  };
  union {
    uint4 weights[kHeads * kBlockWords];
    float4 exchange[2][4][kWarpgroup];  // before there are weights
  };
  bool is_key[4][kKeys];  // of the tile computed and the two on their way; four, for the remainder's sake
  float tops[2][kHeads], totals[2][kHeads];  // of each half of a tile's keys
  float top[kHeads], total[kHeads];          // at the end, for the cluster to read
};
static_assert(offsetof(Shared, keys) % 1024 == 0 && offsetof(Shared, weights) % 1024 == 0,
              "as products need");

// The place of a word of a row in a block of 64 columns.
__device__ __forceinline__ int PlaceOf(int row, int word) { return row * kBlockWords + (word ^ (row & 7)); }

__device__ __forceinline__ uint32_t Pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Two e4m3 numbers, the low bytes of `bits`, times a power of two, as two bf16 numbers.
__device__ __forceinline__ uint32_t Scaled(uint32_t bits, float scale) {
  const uint32_t halves = HalvesOf(bits);
  const float2 numbers = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  return Pair(numbers.x * scale, numbers.y * scale);
}

__device__ __forceinline__ float OfQuad(float value, float (*of)(float, float)) {
  value = of(value, __shfl_xor_sync(kAllLanes, value, 1));
  return of(value, __shfl_xor_sync(kAllLanes, value, 2));
}

__device__ __forceinline__ float Sum(float a, float b) { return a + b; }
__device__ __forceinline__ float Larger(float a, float b) { return fmaxf(a, b); }

// What scores are taken relative to: an infinite top would make a NaN of scores that are as low.
__device__ __forceinline__ float Finite(float top) { return top == -INFINITY ? 0.0f : top; }

// The place of two channels' sums of a head: what the lanes of a warp write lies in different banks.
__device__ __forceinline__ int PlaceOfSums(int head, int pair) { return pair ^ ((head & 7) << 2); }

// Which keys a block's tiles hold.
struct Tiles {
  const Attending& a;
  int64_t request, query;
  int position, of_window, length, num, first, step;

  __device__ Tiles(const Attending& attending, int64_t row, int rank, int cluster)
      : a(attending), request(row / attending.query_rows), query(row), first(rank), step(cluster) {
    position = __ldg(a.positions + row);
    of_window = (a.window_width + kKeys - 1) / kKeys;
    length = min(max(__ldg(a.lengths + row), 0), a.columns);
    const int all = of_window + (length + kKeys - 1) / kKeys;
    num = all > first ? (all - first + step - 1) / step : 0;
  }

  __device__ int ColumnOf(int index) const {
    return (first + index * step - of_window) * kKeys + static_cast<int>(threadIdx.x) / 4;
  }

  // What stands where this thread's row of a tile would be named; it waits for no length.
  __device__ int RowOf(int index) const {
    const int column = ColumnOf(index);
    return column < 0 || column >= a.columns ? -1 : __ldg(a.rows + query * a.columns + column);
  }

  // Where this thread's row of a tile stands; `row` is `RowOf(index)`.
  struct Row {
    const uint8_t *values, *scales;  // this thread's part of them
    bool is_there, in_window;
  };

  __device__ __forceinline__ Row Find(int index, int row) const {
    const int thread = threadIdx.x, quad = thread % 4, tile = first + index * step;
    Row found = {a.window, a.window, false, tile < of_window};
    if (found.in_window) {
      const int back = a.window_width - 1 - (tile * kKeys + thread / 4), at = position - back;
      found.is_there = index < num && back >= 0 && at >= 0;
      if (found.is_there) found.values = a.window + (request * a.ring_rows + at % a.ring_rows) * kRowBytes;
      found.scales = found.values + kValueBytes;
    } else {
      const int block = row < 0 ? 0 : row / a.row_step, slot = row - block * a.row_step;
      found.is_there = index < num && ColumnOf(index) < length && block > 0 && block < a.num_blocks &&
                       slot < a.page_entries;
      const uint8_t* page = a.slab + (found.is_there ? block : 0) * a.stride + a.offset;
      found.values = page + int64_t{found.is_there ? slot : 0} * kValueBytes;
      found.scales = page + a.scales_offset + int64_t{found.is_there ? slot : 0} * kScaleBytes;
    }
    found.values += quad * kWord;
    return found;
  }

  // Sends some of the row's words on their way, and with the first all scales.
  __device__ __forceinline__ void Fetch(const Row& row, int first_word, int words, Raw& raw) const {
    const int thread = threadIdx.x;
#pragma unroll
    for (int word = first_word; word < first_word + words; ++word) {
      const uint8_t* from = row.values + word * 4 * kWord;
      if (row.in_window) {  // rows begin at multiples of 8
        uint2* to = reinterpret_cast<uint2*>(&raw.values[word][thread]);
        CopyAsync<8>(to, from, row.is_there);
        CopyAsync<8>(to + 1, from + 8, row.is_there);
      } else {
        CopyAsync<16>(&raw.values[word][thread], from, row.is_there);
      }
    }
    if (first_word == 0) CopyAsync<8>(&raw.scales[thread], row.scales, row.is_there);
  }
};

// A thread's quarter of a row, as bf16: two words for each that was e4m3.
struct Quarter {
  uint4 words[2 * kNopeWordsOfThread + kWordsOfThread - kNopeWordsOfThread];

  __device__ __forceinline__ void Convert(const Raw& raw) {
    const int thread = threadIdx.x;
    const uint2 scales = raw.scales[thread];
#pragma unroll
    for (int word = 0; word < kNopeWordsOfThread; ++word) {  // four words share a scale
      const uint4 values = raw.values[word][thread];
      const uint32_t byte = ((word < 4 ? scales.x : scales.y) >> (8 * (word % 4))) & 0xff;
      const float scale = __uint_as_float(byte << 23);
      words[2 * word] = {Scaled(values.x, scale), Scaled(values.x >> 16, scale), Scaled(values.y, scale),
                         Scaled(values.y >> 16, scale)};
      words[2 * word + 1] = {Scaled(values.z, scale), Scaled(values.z >> 16, scale), Scaled(values.w, scale),
                             Scaled(values.w >> 16, scale)};
    }
#pragma unroll
    for (int word = kNopeWordsOfThread; word < kWordsOfThread; ++word) {  // rotary channels are bf16
      words[kNopeWordsOfThread + word] = raw.values[word][thread];
    }
  }

  __device__ __forceinline__ void Store(uint4 (&keys)[kBlocks][kKeys * kBlockWords]) const {
    const int key = static_cast<int>(threadIdx.x) / 4, quad = threadIdx.x % 4;
#pragma unroll
    for (int word = 0; word < kNopeWordsOfThread; ++word) {  // four threads' words make a block
      keys[word][PlaceOf(key, 2 * quad)] = words[2 * word];
      keys[word][PlaceOf(key, 2 * quad + 1)] = words[2 * word + 1];
    }
#pragma unroll
    for (int word = kNopeWordsOfThread; word < kWordsOfThread; ++word) {
      keys[kBlocks - 1][PlaceOf(key, (word - kNopeWordsOfThread) * 4 + quad)] =
          words[kNopeWordsOfThread + word];
    }
    Publish();
  }
};

// A warpgroup's scores of all heads with its half of the keys. One barrier inside.
__device__ __forceinline__ void TakeScores(Shared& s, const float (&parts)[32], int half,
                                           float (&scores)[16]) {
  const int thread = threadIdx.x % kWarpgroup;
  const bool low = half == 0;  // and keeps the first half
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float4 given;
    given.x = low ? parts[16 + 4 * i] : parts[4 * i];
    given.y = low ? parts[17 + 4 * i] : parts[4 * i + 1];
    given.z = low ? parts[18 + 4 * i] : parts[4 * i + 2];
    given.w = low ? parts[19 + 4 * i] : parts[4 * i + 3];
    s.exchange[half][i][thread] = given;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 taken = s.exchange[1 - half][i][thread];
    scores[4 * i] = (low ? parts[4 * i] : parts[16 + 4 * i]) + taken.x;
    scores[4 * i + 1] = (low ? parts[4 * i + 1] : parts[17 + 4 * i]) + taken.y;
    scores[4 * i + 2] = (low ? parts[4 * i + 2] : parts[18 + 4 * i]) + taken.z;
    scores[4 * i + 3] = (low ? parts[4 * i + 3] : parts[19 + 4 * i]) + taken.w;
  }
}

// Puts the sums of a cluster's blocks together, each block for its own channels.
__device__ __forceinline__ void PutTogether(Shared& s, const cg::cluster_group& blocks, int num_heads,
                                            uint32_t* out) {
  const int thread = threadIdx.x, rank = blockIdx.x, cluster = gridDim.x;
  auto& of = s.of_cluster;
  for (int i = thread; i < cluster * kHeads; i += kThreads) {
    of.tops[i / kHeads][i % kHeads] = *blocks.map_shared_rank(&s.top[i % kHeads], i / kHeads);
    of.totals[i / kHeads][i % kHeads] = *blocks.map_shared_rank(&s.total[i % kHeads], i / kHeads);
  }
  __syncthreads();
  for (int i = thread; i < cluster * kHeads; i += kThreads) {
    const int head = i % kHeads;
    float highest = -INFINITY, all = 0.0f;
    for (int other = 0; other < cluster; ++other) highest = fmaxf(highest, of.tops[other][head]);
    for (int other = 0; other < cluster; ++other) {
      all += of.totals[other][head] * exp2f(of.tops[other][head] - Finite(highest));
    }
    of.shares[i / kHeads][head] = exp2f(of.tops[i / kHeads][head] - Finite(highest)) / all;
  }
  __syncthreads();
  constexpr int kAtOnce = 4;                 // loads from another block on their way
  const int log_pairs = 9 - __ffs(cluster);  // of channels of a head that this block writes
  const int first_pair = rank << log_pairs, items = num_heads << (log_pairs - 1);
  for (int begin = thread; begin < items; begin += kAtOnce * kThreads) {
    float4 sum[kAtOnce] = {};
    for (int other = 0; other < cluster; ++other) {
      const Shared& there = other == rank ? s : *blocks.map_shared_rank(&s, other);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = 2 * (begin + i * kThreads), head = min(at >> log_pairs, kHeads - 1);
        const int pair = first_pair + (at & ((1 << log_pairs) - 1));
        const float4 part = *reinterpret_cast<const float4*>(&there.sums[head][PlaceOfSums(head, pair)]);
        const float share = of.shares[other][head];
        sum[i].x = fmaf(part.x, share, sum[i].x);
        sum[i].y = fmaf(part.y, share, sum[i].y);
        sum[i].z = fmaf(part.z, share, sum[i].z);
        sum[i].w = fmaf(part.w, share, sum[i].w);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = 2 * (begin + i * kThreads), head = at >> log_pairs;
      const int pair = first_pair + (at & ((1 << log_pairs) - 1));
      if (head < num_heads) {
        *reinterpret_cast<uint2*>(out + head * kWordsOfKey * 4 + pair) = {Pair(sum[i].x, sum[i].y),
                                                                          Pair(sum[i].z, sum[i].w)};
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1) AttendKernel(const Attending a) {
  Shared& s = *reinterpret_cast<Shared*>(SharedMemory());
  const int thread = threadIdx.x, lane = thread % 32, group = lane / 4, quad = lane % 4;
  const int half = thread / kWarpgroup,
            head = thread % kWarpgroup / 32 * 16 + group;  // and the eighth below it
  const int rank = blockIdx.x, cluster = gridDim.x, first_head = blockIdx.z * kHeads;
  const int num_heads = min(kHeads, a.num_heads - first_head);
  const Tiles tiles(a, blockIdx.y, rank, cluster);
  const int rows[2] = {tiles.RowOf(0), tiles.RowOf(1)};
  int next_row = tiles.RowOf(2);
  const int64_t first = (tiles.query * a.num_heads + first_head) * kWordsOfKey;
  if (tiles.position < 0) {  // a row that is not computed: all blocks of the cluster leave
    uint4* const out = reinterpret_cast<uint4*>(a.out) + first;
    for (int i = rank * kThreads + thread; i < num_heads * kWordsOfKey; i += cluster * kThreads) out[i] = {};
    return;
  }
  const auto find = [&](int index, int row) {
    const Tiles::Row found = tiles.Find(index, row);
    if (quad == 0) s.is_key[index % 4][thread / 4] = found.is_there;
    return found;
  };
  tiles.Fetch(find(0, rows[0]), 0, kWordsOfThread, s.raw[0]);
  CloseGroup();
#pragma unroll 4
  for (int i = thread; i < kHeads * kWordsOfKey; i += kThreads) {
    const int of = i / kWordsOfKey, word = i % kWordsOfKey;
    const bool is_there = of < num_heads;
    CopyAsync<kWord>(&s.queries[word / kBlockWords][PlaceOf(of, word % kBlockWords)],
                     a.queries + first + (is_there ? i : 0), is_there);
  }
  CloseGroup();
  tiles.Fetch(find(1, rows[1]), 0, kWordsOfThread, s.raw[1]);
  CloseGroup();

  float sinks[2], top[2], total[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sinks[i] = head + 8 * i < num_heads ? a.sink[first_head + head + 8 * i] * kLog2E : 0.0f;
    top[i] = sinks[i];
  }
  const Matrix queries = RowsOf(s.queries[half * kBlocks / 2]), keys = RowsOf(s.keys[half * kBlocks / 2]);
  const Matrix weights = RowsOf(s.weights), values = ColumnsOf(s.keys[half * kBlocks / 2], kKeys);
  float sums[2 * kHeads] = {};
  Quarter quarter;
  WaitForGroups<2>();
  quarter.Convert(s.raw[0]);
  WaitForGroups<1>();  // the queries

#pragma unroll 1
  for (int index = 0; index < tiles.num; ++index) {
    quarter.Store(s.keys);
    __syncthreads();
    float parts[32], scores[16];
    const Tiles::Row row = find(index + 2, next_row);
    OpenProducts();
#pragma unroll
    for (int step = 0; step < kChannels / 32; ++step) {
      const int words = step / 4 * kKeys * kBlockWords + step % 4 * 2;
      MultiplyRows(parts, queries + words, keys + words, step > 0);
      if (step < kWordsOfThread) tiles.Fetch(row, step, 1, s.raw[index % 2]);  // while it is multiplied
    }
    CloseGroup();
    next_row = tiles.RowOf(index + 3);
    WaitForProducts();
    TakeScores(s, parts, half, scores);
    const bool* const is_key = s.is_key[index % 4] + half * kKeys / 2 + 2 * quad;
    float tops[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scores[i] = is_key[i / 4 * 8 + i % 2] ? scores[i] * a.scale : -INFINITY;
      tops[i / 2 % 2] = fmaxf(tops[i / 2 % 2], scores[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tops[i] = OfQuad(tops[i], Larger);
      if (quad == 0) s.tops[half][head + 8 * i] = tops[i];
    }
    __syncthreads();
    float base[2], factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float highest = fmaxf(s.tops[0][head + 8 * i], s.tops[1][head + 8 * i]);
      const float higher = highest > top[i] + kSlack ? highest : top[i];
      base[i] = Finite(higher);
      factor[i] = exp2f(top[i] - base[i]);
      total[i] *= factor[i];
      top[i] = higher;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = exp2f(scores[2 * i] - base[i % 2]), high = exp2f(scores[2 * i + 1] - base[i % 2]);
      total[i % 2] += low + high;
      uint4& word = s.weights[PlaceOf(head + i % 2 * 8, half * 4 + i / 2)];
      reinterpret_cast<uint32_t*>(&word)[quad] = Pair(low, high);
    }
    if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 2 * kHeads; ++i) sums[i] *= factor[i / 2 % 2];
    }
    Publish();
    __syncthreads();
    OpenProducts();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      MultiplyColumns(sums, weights + 2 * step, values + 16 * step * kBlockWords);
    }
    WaitForGroups<1>();
    quarter.Convert(s.raw[(index + 1) % 2]);
    WaitForProducts();
    __syncthreads();  // the keys have been read
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = OfQuad(total[i], Sum);
    if (quad == 0) {
      s.totals[half][head + 8 * i] = total[i];
      if (half == 0) s.top[head + 8 * i] = top[i];
    }
  }
  WaitForGroups<0>();
  __syncthreads();  // nothing is on its way or read where the sums go
  if (half == 0 && quad == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float all = s.totals[0][head + 8 * i] + s.totals[1][head + 8 * i];
      s.total[head + 8 * i] = all + (rank == 0 ? exp2f(sinks[i] - Finite(top[i])) : 0.0f);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int of = head + i % 2 * 8, pair = (half * kChannels / 2 + i / 2 * 8) / 2 + quad;
    s.sums[of][PlaceOfSums(of, pair)] = {sums[2 * i], sums[2 * i + 1]};
  }
  const cg::cluster_group blocks = cg::this_cluster();
  blocks.sync();
  PutTogether(s, blocks, num_heads, a.out + first * 4);
  blocks.sync();  // no block may leave while another reads its memory
}

}  // namespace hisparse::attention

#endif  // HISPARSE_FFI_ATTEND_KERNEL_H_
