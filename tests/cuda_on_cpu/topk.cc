// The kernels of top-k for a caller from Python: ffi/topk_select.cu without a GPU, a block a row.
#include "topk_parts.h"
#include "topk_whole.h"

using namespace hisparse;

// `sizes`: rows, N, k, seed, whether a row is taken whole.
extern "C" void topk(const void* scores, const void* lengths, void* selected, const int64_t* sizes) {
  const auto size = [&](int i) { return static_cast<int>(sizes[i]); };
  const int num_rows = size(0), columns = size(1), k = size(2);
  const auto* of_rows = static_cast<const float*>(scores);
  const auto* of_lengths = static_cast<const int32_t*>(lengths);
  auto* to = static_cast<int32_t*>(selected);
  const size_t bits_bytes = BitsBytes(columns);
  const int list_size = ListSize(k, 1, bits_bytes);
  const auto kernel = [&] {
    if (size(4)) {
      TopkSelectWhole<float, 1>(of_rows, of_lengths, to, columns, k);
    } else {
      TopkSelectParts<float, 2>(of_rows, of_lengths, to, columns, k, list_size);
    }
  };
  emulator::grid = {static_cast<unsigned>(num_rows), 1, 1};
  for (unsigned row = 0; row < emulator::grid.x; ++row) {
    emulator::RunCluster(1, {row, 0, 0}, kThreads, bits_bytes + kItemBytes * list_size,
                         static_cast<unsigned>(size(3)) + row, kernel);
  }
}
