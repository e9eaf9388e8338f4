// Index scores of the entries of a paged cache: sum over heads of weight * relu(query . key) * scale, for fp8
// index rows. Reference: pallas_kernels/ref.py.
//
// A warp keeps all heads of one query in registers, as the B operand of m16n8k16 products, and streams keys
// past them, sixteen at a time: what a lane loads is what it multiplies. e4m3 numbers are exact in f16, and
// their products in f32. Which lane has which channels only permutes the terms of the sum, for keys and
// queries alike: the four lanes of a key read 64 bytes of it side by side, then the next 64.
#ifndef HISPARSE_FFI_SCORE_KERNEL_H_
#define HISPARSE_FFI_SCORE_KERNEL_H_

#include "cuda_block.h"
#include "cuda_tiles.h"

namespace hisparse::scores {

constexpr int kScoreWarps = 4, kScoreThreads = 32 * kScoreWarps;
constexpr int kTile = 16;  // entries a warp scores at a time
constexpr int kWord = 16;  // bytes of a load

struct Scoring {
  const uint8_t* slab;
  const int32_t* blocks;
  const uint8_t* queries;
  const float* weights;
  const int32_t* lengths;
  float* scores;
  int64_t stride, offset;
  int num_blocks, num_pages, page_entries, query_rows;
  int tiles;  // of a warp
};

// Sixteen keys on their way to a warp. Every lane has its own channels of two of them brought to a place of
// its own in shared memory, which no other lane reads: there is nothing to wait for but its own copies.
template <int kWords>
struct Stage {
  uint4 words[2][kWords][32];
  float scales[2][32];

  __device__ __forceinline__ void Fetch(const Scoring& s, int block, int first, int channel_bytes) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const bool is_there = block > 0 && block < s.num_blocks;
    const uint8_t* page = s.slab + (is_there ? block : 0) * s.stride + s.offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int entry = first + half * 8 + group;
      const uint8_t* from = page + entry * channel_bytes + quad * kWord;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        CopyAsync<kWord>(&words[half][word][lane], from + word * 4 * kWord, is_there);
      }
      const uint8_t* scale = page + s.page_entries * channel_bytes + entry * sizeof(float);
      CopyAsync<sizeof(float)>(&scales[half][lane], scale, is_there);
    }
  }
};

__device__ __forceinline__ uint32_t WordAt(const uint4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

template <int kHeadTiles, int kChannels>
__global__ void __launch_bounds__(kScoreThreads, 2) ScoreKernel(const Scoring s) {
  constexpr int kSteps = kChannels / 16, kWords = kChannels / 4 / kWord, kHeads = 8 * kHeadTiles;
  constexpr int kStages = 8 / kWords;
  __shared__ Stage<kWords> stages[kScoreWarps][kStages];
  Stage<kWords>* const mine = stages[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int64_t row = blockIdx.y;  // of a request and one of its query rows
  const int64_t request = row / s.query_rows;
  const int columns = s.num_pages * s.page_entries;
  const int length = min(max(s.lengths[request], 0), columns);
  const int begin = (blockIdx.x * kScoreWarps + threadIdx.x / 32) * s.tiles;
  const int end = min(begin + s.tiles, (length + kTile - 1) / kTile);
  if (begin >= end) return;
  const int32_t* const blocks = s.blocks + request * s.num_pages;
  const int tiles_of_page = s.page_entries / kTile;
  int page = begin / tiles_of_page, tile_of_page = begin % tiles_of_page;  // that are fetched next
  int first_page = page;  // of the 32 whose blocks the lanes hold
  int held = page + lane < s.num_pages ? blocks[page + lane] : 0;
  const auto fetch = [&](int tile) {  // in order
    if (tile < end) {
      if (page == first_page + 32) {
        first_page = page;
        held = page + lane < s.num_pages ? blocks[page + lane] : 0;
      }
      const int block = __shfl_sync(kAllLanes, held, page - first_page);
      mine[(tile - begin) % kStages].Fetch(s, block, tile_of_page * kTile, kChannels);
      if (++tile_of_page == tiles_of_page) {
        tile_of_page = 0;
        ++page;
      }
    }
    CloseGroup();
  };
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) fetch(begin + ahead);
  uint32_t query[kHeadTiles][kSteps][2];
  float2 weights[kHeadTiles];
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile) {
    const int64_t head = row * kHeads + tile * 8;
    const uint4* from = reinterpret_cast<const uint4*>(s.queries + (head + group) * kChannels) + quad;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t bytes = WordAt(__ldg(from + step / 4 * 4), step % 4);
      query[tile][step][0] = HalvesOf(bytes);
      query[tile][step][1] = HalvesOf(bytes >> 16);
    }
    weights[tile] = __ldg(reinterpret_cast<const float2*>(s.weights + head) + quad);
  }

#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    WaitForGroups<kStages - 2>();
    const Stage<kWords>& stage = mine[(tile - begin) % kStages];
    uint4 keys[2][kWords];
    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) keys[half][word] = stage.words[half][word][lane];
      scales[half] = stage.scales[half][lane];
    }
    fetch(tile + kStages - 1);
    float sums[kHeadTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t low = WordAt(keys[0][step / 4], step % 4), high = WordAt(keys[1][step / 4], step % 4);
      const uint32_t halves[4] = {HalvesOf(low), HalvesOf(high), HalvesOf(low >> 16), HalvesOf(high >> 16)};
#pragma unroll
      for (int heads = 0; heads < kHeadTiles; ++heads)
        MultiplyF16(sums[heads], halves, query[heads][step][0], query[heads][step][1]);
    }
    float scores[2] = {};
#pragma unroll
    for (int heads = 0; heads < kHeadTiles; ++heads) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scores[half] = fmaf(weights[heads].x, Relu(sums[heads][2 * half]), scores[half]);
        scores[half] = fmaf(weights[heads].y, Relu(sums[heads][2 * half + 1]), scores[half]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scores[half] += __shfl_xor_sync(kAllLanes, scores[half], 1);
      scores[half] += __shfl_xor_sync(kAllLanes, scores[half], 2);
      if (quad == 0) s.scores[row * columns + tile * kTile + half * 8 + group] = scores[half] * scales[half];
    }
  }
}

}  // namespace hisparse::scores

#endif  // HISPARSE_FFI_SCORE_KERNEL_H_
