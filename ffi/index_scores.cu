// Index scores of the entries of a paged cache, as an XLA custom call: see score_kernel.h. Reference:
// pallas_kernels/ref.py.
#include <algorithm>

#include "cuda_launch.h"
#include "score_kernel.h"

namespace hisparse {
namespace {

using namespace scores;

constexpr int kBlocksOnGpu = 264;  // that an H200 holds: 132 multiprocessors, two each
constexpr int kMostRows = 65535;   // of a grid

template <int kChannels>
void (*KernelOf(int64_t heads))(Scoring) {
  switch (heads) {
    case 8:
      return ScoreKernel<1, kChannels>;
    case 16:
      return ScoreKernel<2, kChannels>;
    case 32:
      return ScoreKernel<4, kChannels>;
    default:
      if constexpr (kChannels == 128) {
        if (heads == 64) return ScoreKernel<8, kChannels>;
      }
      return nullptr;
  }
}

ffi::Error IndexScores(cudaStream_t stream, int32_t ordinal, ffi::Buffer<ffi::U8, 2> slab,
                       ffi::Buffer<ffi::S32, 2> blocks, ffi::Buffer<ffi::U8, 4> queries,
                       ffi::Buffer<ffi::F32, 3> weights, ffi::Buffer<ffi::S32, 1> lengths,
                       ffi::ResultBuffer<ffi::F32, 3> scores, int64_t page_entries, int64_t offset) {
  const auto shape = queries.dimensions();  // requests, query rows, heads, channels
  const int64_t num_pages = blocks.dimensions()[1], stride = slab.dimensions()[1];
  const auto kernel = shape[3] == 128   ? KernelOf<128>(shape[2])
                      : shape[3] == 256 ? KernelOf<256>(shape[2])
                                        : nullptr;
  if (kernel == nullptr) {
    return ffi::Error::InvalidArgument("index_scores: there is no kernel for " + std::to_string(shape[2]) +
                                       " heads of " + std::to_string(shape[3]) + " channels");
  }
  const int64_t page_bytes = page_entries * (shape[3] + static_cast<int64_t>(sizeof(float)));
  if (page_entries <= 0 || page_entries % kTile || offset < 0 || offset % kWord || stride % kWord ||
      offset + page_bytes > stride || slab.dimensions()[0] > INT32_MAX) {
    return ffi::Error::InvalidArgument(
        "index_scores: pages of " + std::to_string(page_entries) + " entries at byte " +
        std::to_string(offset) + " of blocks of " + std::to_string(stride) +
        ": entries and bytes must be multiples of 16, and stay in their block");
  }
  const auto of_scores = scores->dimensions(), of_weights = weights.dimensions();
  if (blocks.dimensions()[0] != shape[0] || static_cast<int64_t>(lengths.element_count()) != shape[0] ||
      !std::equal(of_weights.begin(), of_weights.end(), shape.begin()) || of_scores[0] != shape[0] ||
      of_scores[1] != shape[1] || of_scores[2] != num_pages * page_entries || of_scores[2] > INT32_MAX ||
      shape[0] * shape[1] > kMostRows) {
    return ffi::Error::InvalidArgument(
        "index_scores: blocks are [R, P], queries [R, T, H, d], weights [R, T, H], lengths [R], scores [R, "
        "T, P * E]");
  }
  const int64_t num_rows = shape[0] * shape[1], tiles_of_row = num_pages * page_entries / kTile;
  if (num_rows == 0 || tiles_of_row == 0) return ffi::Error::Success();
  const int64_t shares = std::max<int64_t>(1, kBlocksOnGpu / num_rows) * kScoreWarps;  // warps of a row
  const int64_t tiles = (tiles_of_row + shares - 1) / shares;
  const Scoring scoring = {slab.typed_data(),
                           blocks.typed_data(),
                           queries.typed_data(),
                           weights.typed_data(),
                           lengths.typed_data(),
                           scores->typed_data(),
                           stride,
                           offset,
                           static_cast<int>(slab.dimensions()[0]),
                           static_cast<int>(num_pages),
                           static_cast<int>(page_entries),
                           static_cast<int>(shape[1]),
                           static_cast<int>(tiles)};
  const int64_t of_block = tiles * kScoreWarps;
  const dim3 grid(static_cast<unsigned>((tiles_of_row + of_block - 1) / of_block),
                  static_cast<unsigned>(num_rows));
  return Launch("index_scores", stream, ordinal, grid, kScoreThreads, 1, 0, kernel, scoring);
}

auto BindIndexScores() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::Buffer<ffi::U8, 2>>()   // slab [N, stride]
      .Arg<ffi::Buffer<ffi::S32, 2>>()  // blocks [R, P]
      .Arg<ffi::Buffer<ffi::U8, 4>>()   // queries, e4m3 [R, T, H, d]
      .Arg<ffi::Buffer<ffi::F32, 3>>()  // weights [R, T, H]
      .Arg<ffi::Buffer<ffi::S32, 1>>()  // lengths [R]
      .Ret<ffi::Buffer<ffi::F32, 3>>()  // scores [R, T, P * page_entries]
      .Attr<int64_t>("page_entries")
      .Attr<int64_t>("offset");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_index_scores_cuda, IndexScores, BindIndexScores(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
