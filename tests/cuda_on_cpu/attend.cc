// The attention kernel for a caller from Python: ffi/sparse_attention.cu without a GPU.
#include "attend_kernel.h"

using hisparse::attention::Attending;
using hisparse::attention::AttendKernel;
using hisparse::attention::kHeads;
using hisparse::attention::Shared;

namespace {

void Attend(const Attending& attending, unsigned num_rows, unsigned cluster, unsigned seed) {
  const unsigned head_blocks = (attending.num_heads + kHeads - 1) / kHeads;
  emulator::grid = {cluster, num_rows, head_blocks};
  for (unsigned z = 0; z < head_blocks; ++z) {
    for (unsigned y = 0; y < num_rows; ++y) {
      emulator::RunCluster(static_cast<int>(cluster), {0, y, z}, hisparse::attention::kThreads,
                           sizeof(Shared), seed + y, [&] { AttendKernel(attending); });
    }
  }
}

}  // namespace

// `sizes`: stride, offset, blocks, heads, R * T, T, W, window width, K, entries of a page, row step, blocks
// of a cluster, seed.
extern "C" void attend(const void* queries, const void* window, const void* positions, const void* slab,
                       const void* rows, const void* lengths, const void* sink, void* out,
                       const int64_t* sizes) {
  const auto size = [&](int i) { return static_cast<int>(sizes[i]); };
  const Attending attending = {static_cast<const uint4*>(queries),
                               static_cast<const uint8_t*>(window),
                               static_cast<const int32_t*>(positions),
                               static_cast<const uint8_t*>(slab),
                               static_cast<const int32_t*>(rows),
                               static_cast<const int32_t*>(lengths),
                               static_cast<const float*>(sink),
                               static_cast<uint32_t*>(out),
                               sizes[0],
                               sizes[1],
                               sizes[9] * hisparse::attention::kValueBytes,
                               size(2),
                               size(3),
                               size(5),
                               size(6),
                               size(7),
                               size(8),
                               size(9),
                               size(10),
                               hisparse::attention::kLog2E / sqrtf(hisparse::attention::kChannels)};
  Attend(attending, static_cast<unsigned>(size(4)), static_cast<unsigned>(size(11)),
         static_cast<unsigned>(size(12)));
}
