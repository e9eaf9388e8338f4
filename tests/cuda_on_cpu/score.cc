// The kernel of index scores for a caller from Python: ffi/index_scores.cu without a GPU.
#include "score_kernel.h"

using hisparse::scores::kScoreThreads;
using hisparse::scores::kScoreWarps;
using hisparse::scores::kTile;
using hisparse::scores::ScoreKernel;
using hisparse::scores::Scoring;

// `sizes`: stride, offset, blocks, P, entries of a page, T, tiles of a warp, R * T, heads, channels, seed.
// False: there is no kernel for these heads and channels here.
extern "C" bool score(const void* slab, const void* blocks, const void* queries, const void* weights,
                      const void* lengths, void* scores, const int64_t* sizes) {
  const auto size = [&](int i) { return static_cast<int>(sizes[i]); };
  const Scoring scoring = {static_cast<const uint8_t*>(slab),
                           static_cast<const int32_t*>(blocks),
                           static_cast<const uint8_t*>(queries),
                           static_cast<const float*>(weights),
                           static_cast<const int32_t*>(lengths),
                           static_cast<float*>(scores),
                           sizes[0],
                           sizes[1],
                           size(2),
                           size(3),
                           size(4),
                           size(5),
                           size(6)};
  void (*kernel)(Scoring) = nullptr;
  if (size(8) == 8 && size(9) == 128) kernel = ScoreKernel<1, 128>;
  if (size(8) == 64 && size(9) == 128) kernel = ScoreKernel<8, 128>;
  if (size(8) == 32 && size(9) == 256) kernel = ScoreKernel<4, 256>;
  if (kernel == nullptr) return false;
  const int of_block = size(6) * kScoreWarps * kTile, columns = size(3) * size(4);
  const unsigned blocks_of_row = (columns + of_block - 1) / of_block, rows = static_cast<unsigned>(size(7));
  emulator::grid = {blocks_of_row, rows, 1};
  for (unsigned y = 0; y < rows; ++y) {
    for (unsigned x = 0; x < blocks_of_row; ++x) {
      emulator::RunCluster(1, {x, y, 0}, kScoreThreads, 0, static_cast<unsigned>(size(10)) + x,
                           [&] { kernel(scoring); });
    }
  }
  return true;
}
