// Attention of decode over fp8 entry rows: one softmax over a request's sliding window, selected rows of the
// paged cache, and a sink for each head. Keys are values. Reference: pallas_kernels/ref.py.
//
// A block has 64 heads (or 32, or 16) of one query in shared memory and takes 64 keys at a time: their bytes
// are on their way two tiles ahead, are turned into bf16 once, and serve both products (m16n8k16, sums in
// f32). The blocks of a cluster share the tiles of one query and put their sums together at the end, each for
// its own channels. Nothing depends on which block is done first.
//
// Included after cuda_tiles.h, or after what stands in for it where no GPU is (tests/cuda_on_cpu).
#ifndef HISPARSE_FFI_ATTEND_KERNEL_H_
#define HISPARSE_FFI_ATTEND_KERNEL_H_

namespace hisparse::attention {

namespace cg = cooperative_groups;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kKeys = 64;  // of a tile
constexpr int kChannels = 512, kNope = 448;
constexpr int kValueBytes = 576, kScaleBytes = 8, kRowBytes = kValueBytes + kScaleBytes;
constexpr int kWord = 16;                                // bytes of an access to shared memory
constexpr int kWordsOfKey = kChannels * 2 / kWord;       // as bf16
constexpr int kWordsOfThread = kValueBytes / kWord / 4;  // of a row's values: four threads have a row
constexpr int kNopeWordsOfThread = kNope / kWord / 4;    // of which e4m3
constexpr int kChannelsOfWarp = kChannels / kWarps;
constexpr int kMostCluster = 8, kMostHeads = 64;  // of a block
constexpr float kLog2E = 1.4426950408889634f;

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

// The place of a word in rows of `kWordsOfRow` words: eight rows' words of one column lie in different banks.
template <int kWordsOfRow>
__device__ __forceinline__ int PlaceOf(int row, int word) {
  return row * kWordsOfRow + (word ^ (row & 7));
}

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

// A row's bytes on their way, in places that only the thread that fetches them reads.
struct Raw {
  uint4 values[kWordsOfThread][kThreads];
  uint2 scales[kThreads];
};

// Which of a tile's scores a warp has: of 16 heads and 8 * kTiles keys. On the way there it has sums over
// half of the channels for twice as many, of which it gives a half to `partner`, so that what it loads serves
// twice as often: two tiles of heads where a block has them, else two of keys.
template <int kHeads>
struct Part {
  static constexpr bool kTwoOfHeads = kHeads > 16;
  static constexpr int kHeadGroups = kHeads / 32 > 1 ? 2 : 1, kKeyGroups = 4 / kHeadGroups;
  static constexpr int kTiles = kTwoOfHeads ? kKeys / kKeyGroups / 8 : 1;
  static constexpr int kParts = kKeys / (8 * kTiles);  // of a tile's keys

  int warp = static_cast<int>(threadIdx.x) / 32, partner = warp ^ 4, half = warp / 4;
  int channels = half * (kChannels / 2), heads = warp % kHeadGroups * 32;
  int key_group = warp / kHeadGroups % kKeyGroups, keys = key_group * (kKeys / kKeyGroups);  // on the way
  int head = kTwoOfHeads ? heads + half * 16 : heads, number = kTwoOfHeads ? key_group : 2 * key_group + half;
  int key = number * 8 * kTiles;
};

template <int kHeads>
struct Shared {
  union {
    uint4 queries[kHeads * kWordsOfKey];
    struct {  // at the end: what each block of the cluster found, and its share in the result
      float tops[kMostCluster][kHeads], totals[kMostCluster][kHeads], shares[kMostCluster][kHeads];
    } of_cluster;
  };
  union {
    struct {
      uint4 keys[kKeys * kWordsOfKey];
      union {
        uint4 weights[kHeads * kKeys * 2 / kWord];
        float4 exchange[kWarps][Part<kHeads>::kTiles][32];  // before there are weights
      };
      Raw raw[2];
    };
    float2 sums[kHeads][kChannels / 2];  // at the end
  };
  bool is_key[4][kKeys];  // of the tile computed, the two on their way, and the last
  float tops[Part<kHeads>::kParts][kHeads], totals[Part<kHeads>::kParts][kHeads];
  float factors[kHeads];
  float top[kHeads], total[kHeads];  // at the end, for the cluster to read
};

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

  // `row` is `RowOf(index)`.
  __device__ void Fetch(int index, int row, Raw& raw, bool* is_key) const {
    if (index >= num) return;
    const int thread = threadIdx.x, quad = thread % 4, tile = first + index * step;
    bool is_there;
    if (tile < of_window) {
      const int back = a.window_width - 1 - (tile * kKeys + thread / 4), at = position - back;
      is_there = back >= 0 && at >= 0;
      const uint8_t* from =
          a.window + (request * a.ring_rows + (is_there ? at % a.ring_rows : 0)) * kRowBytes;
#pragma unroll
      for (int word = 0; word < kWordsOfThread; ++word) {  // a row begins at a multiple of 8
        const uint8_t* half = from + (word * 4 + quad) * kWord;
        uint2* to = reinterpret_cast<uint2*>(&raw.values[word][thread]);
        CopyAsync<8>(to, half, is_there);
        CopyAsync<8>(to + 1, half + 8, is_there);
      }
      CopyAsync<8>(&raw.scales[thread], from + kValueBytes, is_there);
    } else {
      if (ColumnOf(index) >= length) row = -1;
      const int block = row < 0 ? 0 : row / a.row_step, slot = row - block * a.row_step;
      is_there = block > 0 && block < a.num_blocks && slot < a.page_entries;
      const uint8_t* page = a.slab + (is_there ? block : 0) * a.stride + a.offset;
      const uint8_t* from = page + int64_t{is_there ? slot : 0} * kValueBytes + quad * kWord;
#pragma unroll
      for (int word = 0; word < kWordsOfThread; ++word) {
        CopyAsync<16>(&raw.values[word][thread], from + word * 4 * kWord, is_there);
      }
      const uint8_t* scales = page + a.scales_offset + int64_t{is_there ? slot : 0} * kScaleBytes;
      CopyAsync<8>(&raw.scales[thread], scales, is_there);
    }
    if (quad == 0) is_key[thread / 4] = is_there;
  }
};

// A thread's quarter of a row, as bf16.
__device__ __forceinline__ void Convert(const Raw& raw, uint4* keys) {
  const int thread = threadIdx.x, row = thread / 4, quad = thread % 4;
  const uint2 scales = raw.scales[thread];
#pragma unroll
  for (int word = 0; word < kNopeWordsOfThread; ++word) {  // four words share a scale
    const uint4 values = raw.values[word][thread];
    const uint32_t byte = ((word < 4 ? scales.x : scales.y) >> (8 * (word % 4))) & 0xff;
    const float scale = __uint_as_float(byte << 23);
    const int to = 2 * (word * 4 + quad);
    keys[PlaceOf<kWordsOfKey>(row, to)] = {Scaled(values.x, scale), Scaled(values.x >> 16, scale),
                                           Scaled(values.y, scale), Scaled(values.y >> 16, scale)};
    keys[PlaceOf<kWordsOfKey>(row, to + 1)] = {Scaled(values.z, scale), Scaled(values.z >> 16, scale),
                                               Scaled(values.w, scale), Scaled(values.w >> 16, scale)};
  }
#pragma unroll
  for (int word = kNopeWordsOfThread; word < kWordsOfThread; ++word) {  // rotary channels are bf16
    const int to = kNope * 2 / kWord + (word - kNopeWordsOfThread) * 4 + quad;
    keys[PlaceOf<kWordsOfKey>(row, to)] = raw.values[word][thread];
  }
}

// A warp's scores. One barrier inside.
template <int kHeads, int kTiles>
__device__ __forceinline__ void Score(Shared<kHeads>& s, const Part<kHeads>& part,
                                      float (&scores)[kTiles][4]) {
  constexpr bool kTwoOfHeads = Part<kHeads>::kTwoOfHeads;
  constexpr int kQueryLoads = kTwoOfHeads ? 2 : 1, kKeyLoads = kTwoOfHeads ? kTiles / 2 : 1;  // 16 rows each
  const int lane = threadIdx.x % 32;
  const int query_row = part.heads + lane % 16, key_row = part.keys + lane / 16 * 8 + lane % 8;
  const int query_word = part.channels * 2 / kWord + lane / 16,
            key_word = part.channels * 2 / kWord + lane / 8 % 2;
  float sums[2][kTiles][4] = {};
#pragma unroll 4
  for (int step = 0; step < kChannels / 32; ++step) {
    uint32_t query[kQueryLoads][4], keys[kKeyLoads][4];
#pragma unroll
    for (int i = 0; i < kQueryLoads; ++i) {
      LoadMatrices(query[i], &s.queries[PlaceOf<kWordsOfKey>(query_row + 16 * i, 2 * step + query_word)]);
    }
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      LoadMatrices(keys[i], &s.keys[PlaceOf<kWordsOfKey>(key_row + 16 * i, 2 * step + key_word)]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int of_heads = kTwoOfHeads ? i : 0, of_keys = kTwoOfHeads ? tile : i;
        MultiplyBf16(sums[i][tile], query[of_heads], keys[of_keys / 2][of_keys % 2 * 2],
                     keys[of_keys / 2][of_keys % 2 * 2 + 1]);
      }
    }
  }
  const bool low = part.half == 0;  // and keeps the first half
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float4 given;
    given.x = low ? sums[1][tile][0] : sums[0][tile][0];
    given.y = low ? sums[1][tile][1] : sums[0][tile][1];
    given.z = low ? sums[1][tile][2] : sums[0][tile][2];
    given.w = low ? sums[1][tile][3] : sums[0][tile][3];
    s.exchange[part.warp][tile][lane] = given;
  }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float4 taken = s.exchange[part.partner][tile][lane];
    scores[tile][0] = (low ? sums[0][tile][0] : sums[1][tile][0]) + taken.x;
    scores[tile][1] = (low ? sums[0][tile][1] : sums[1][tile][1]) + taken.y;
    scores[tile][2] = (low ? sums[0][tile][2] : sums[1][tile][2]) + taken.z;
    scores[tile][3] = (low ? sums[0][tile][3] : sums[1][tile][3]) + taken.w;
  }
}

// Adds a tile's keys, weighed, to the sums of all heads and this warp's channels.
template <int kHeads, int kTilesOfHeads>
__device__ __forceinline__ void AddValues(const Shared<kHeads>& s, float (&sums)[kTilesOfHeads][8][4]) {
  constexpr int kWordsOfWeights = kKeys * 2 / kWord;
  const int lane = threadIdx.x % 32, group = lane / 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int heads = 0; heads < kTilesOfHeads; ++heads) {
    const float low = s.factors[16 * heads + group], high = s.factors[16 * heads + 8 + group];
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      sums[heads][tile][0] *= low;
      sums[heads][tile][1] *= low;
      sums[heads][tile][2] *= high;
      sums[heads][tile][3] *= high;
    }
  }
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t weights[kTilesOfHeads][4];
#pragma unroll
    for (int heads = 0; heads < kTilesOfHeads; ++heads) {
      LoadMatrices(weights[heads],
                   &s.weights[PlaceOf<kWordsOfWeights>(16 * heads + lane % 16, 2 * step + lane / 16)]);
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t values[4];
      const int row = 16 * step + lane / 8 % 2 * 8 + lane % 8, word = 8 * warp + 2 * pair + lane / 16;
      LoadTransposed(values, &s.keys[PlaceOf<kWordsOfKey>(row, word)]);
#pragma unroll
      for (int heads = 0; heads < kTilesOfHeads; ++heads) {
        MultiplyBf16(sums[heads][2 * pair], weights[heads], values[0], values[1]);
        MultiplyBf16(sums[heads][2 * pair + 1], weights[heads], values[2], values[3]);
      }
    }
  }
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

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1) AttendKernel(const Attending a) {
  constexpr int kTilesOfHeads = kHeads / 16, kTiles = Part<kHeads>::kTiles, kParts = Part<kHeads>::kParts;
  Shared<kHeads>& s = *reinterpret_cast<Shared<kHeads>*>(SharedMemory());
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, group = lane / 4, quad = lane % 4;
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
#pragma unroll
  for (int i = thread; i < kHeads * kWordsOfKey; i += kThreads) {
    const int head = i / kWordsOfKey, word = i % kWordsOfKey;
    const bool is_there = head < num_heads;
    CopyAsync<16>(&s.queries[PlaceOf<kWordsOfKey>(head, word)], a.queries + first + (is_there ? i : 0),
                  is_there);
  }
  tiles.Fetch(0, rows[0], s.raw[0], s.is_key[0]);
  CloseGroup();
  tiles.Fetch(1, rows[1], s.raw[1], s.is_key[1]);
  CloseGroup();

  const Part<kHeads> part;
  const int my_heads[2] = {part.head + group, part.head + group + 8};
  float sinks[2], top[2], total[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sinks[i] = my_heads[i] < num_heads ? a.sink[first_head + my_heads[i]] * kLog2E : 0.0f;
    top[i] = sinks[i];
  }
  float sums[kTilesOfHeads][8][4] = {};

#pragma unroll 1
  for (int index = 0; index < tiles.num; ++index) {
    WaitForGroups<1>();
    __syncthreads();  // the last tile's keys have been read
    Convert(s.raw[index % 2], s.keys);
    __syncthreads();
    float scores[kTiles][4], tops[2] = {-INFINITY, -INFINITY};
    tiles.Fetch(index + 2, next_row, s.raw[index % 2], s.is_key[(index + 2) % 4]);
    CloseGroup();
    next_row = tiles.RowOf(index + 3);
    Score(s, part, scores);
    const bool* const is_key = s.is_key[index % 4] + part.key + 2 * quad;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[tile][i];
        score = is_key[8 * tile + i % 2] ? score * a.scale : -INFINITY;
        tops[i / 2] = fmaxf(tops[i / 2], score);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tops[i] = OfQuad(tops[i], Larger);
      if (quad == 0) s.tops[part.number][my_heads[i]] = tops[i];
    }
    __syncthreads();
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float higher = top[i];
#pragma unroll
      for (int other = 0; other < kParts; ++other) higher = fmaxf(higher, s.tops[other][my_heads[i]]);
      base[i] = Finite(higher);
      const float factor = exp2f(top[i] - base[i]);
      total[i] *= factor;
      top[i] = higher;
      if (part.number == 0 && quad == 0) s.factors[my_heads[i]] = factor;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = exp2f(scores[tile][2 * i] - base[i]),
                    high = exp2f(scores[tile][2 * i + 1] - base[i]);
        total[i] += low + high;
        uint4& word = s.weights[PlaceOf<kKeys * 2 / kWord>(my_heads[i], part.key / 8 + tile)];
        reinterpret_cast<uint32_t*>(&word)[quad] = Pair(low, high);
      }
    }
    __syncthreads();
    AddValues(s, sums);
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] = OfQuad(total[i], Sum);
    if (quad == 0) {
      s.totals[part.number][my_heads[i]] = total[i];
      if (part.number == 0) s.top[my_heads[i]] = top[i];
    }
  }
  WaitForGroups<0>();
  __syncthreads();  // nothing is on its way or read where the sums go
  if (part.number == 0 && quad == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float all = 0.0f;
#pragma unroll
      for (int other = 0; other < kParts; ++other) all += s.totals[other][my_heads[i]];
      s.total[my_heads[i]] = all + (rank == 0 ? exp2f(sinks[i] - Finite(top[i])) : 0.0f);
    }
  }
#pragma unroll
  for (int heads = 0; heads < kTilesOfHeads; ++heads) {
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      const int pair = (kChannelsOfWarp * warp + 8 * tile) / 2 + quad;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of = 16 * heads + 8 * i + group;
        s.sums[of][PlaceOfSums(of, pair)] = {sums[heads][tile][2 * i], sums[heads][tile][2 * i + 1]};
      }
    }
  }
  const cg::cluster_group blocks = cg::this_cluster();
  blocks.sync();
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
      const Shared<kHeads>& there = *blocks.map_shared_rank(&s, other);
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
        *reinterpret_cast<uint2*>(a.out + (first + head * kWordsOfKey) * 4 + pair) = {
            Pair(sum[i].x, sum[i].y), Pair(sum[i].z, sum[i].w)};
      }
    }
  }
  blocks.sync();  // no block may leave while another reads its memory
}

}  // namespace hisparse::attention

#endif  // HISPARSE_FFI_ATTEND_KERNEL_H_
