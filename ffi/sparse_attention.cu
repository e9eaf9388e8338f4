// Attention of decode over fp8 entry rows, as an XLA custom call: see attend_kernel.h. Reference:
// pallas_kernels/ref.py.
#include <algorithm>
#include <atomic>

#include "attend_kernel.h"
#include "cuda_launch.h"

namespace hisparse {
namespace {

using namespace attention;

constexpr const char* kName = "sparse_attention";
constexpr int kMostRows = 65535;  // of a grid

// How many clusters of `cluster` blocks the GPU runs at the same time; a block fills a multiprocessor.
ffi::Error ClustersAtOnce(int ordinal, int cluster, int* count) {
  constexpr int kDevices = 64;
  // One more than the answer; 0: not asked yet.
  static std::atomic<int> known[kDevices][kMostCluster + 1];
  std::atomic<int>& kept = known[ordinal % kDevices][cluster];
  *count = kept.load() - 1;
  if (*count >= 0) return ffi::Error::Success();
  cudaLaunchAttribute attribute = ClustersOf(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.attrs = &attribute;
  config.numAttrs = 1;
  ffi::Error error = CheckCuda(
      kName, "cudaFuncSetAttribute",
      cudaFuncSetAttribute(AttendKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int{sizeof(Shared)}));
  if (error.failure()) return error;
  error = CheckCuda(kName, "cudaOccupancyMaxActiveClusters",
                    cudaOccupancyMaxActiveClusters(count, AttendKernel, &config));
  if (error.success()) kept.store(*count + 1);
  return error;
}

// Blocks that share a query: as many as all run at the same time, each with a tile to take. Another number
// would sum in another order.
ffi::Error ChooseCluster(int ordinal, int64_t queries, int64_t tiles, int* cluster) {
  for (*cluster = kMostCluster; *cluster > 1; *cluster /= 2) {
    int at_once = 0;
    ffi::Error error = ClustersAtOnce(ordinal, *cluster, &at_once);
    if (error.failure() || (*cluster <= tiles && queries <= at_once)) return error;
  }
  return ffi::Error::Success();
}

ffi::Error SparseAttention(cudaStream_t stream, int32_t ordinal, ffi::Buffer<ffi::BF16, 4> queries,
                           ffi::Buffer<ffi::U8, 3> window, ffi::Buffer<ffi::S32, 2> positions,
                           ffi::Buffer<ffi::U8, 2> slab, ffi::Buffer<ffi::S32, 3> rows,
                           ffi::Buffer<ffi::S32, 2> lengths, ffi::Buffer<ffi::F32, 1> sink,
                           ffi::ResultBuffer<ffi::BF16, 4> out, int64_t window_width, int64_t page_entries,
                           int64_t offset, int64_t row_step) {
  const auto shape = queries.dimensions(), ring = window.dimensions(), selected = rows.dimensions();
  const auto at = positions.dimensions(), of_lengths = lengths.dimensions(), result = out->dimensions();
  const int64_t stride = slab.dimensions()[1];
  if (shape[3] != kChannels || ring[2] != kRowBytes || ring[0] != shape[0] || selected[0] != shape[0] ||
      selected[1] != shape[1] || at[0] != shape[0] || at[1] != shape[1] || of_lengths[0] != shape[0] ||
      of_lengths[1] != shape[1] || static_cast<int64_t>(sink.element_count()) != shape[2] ||
      !std::equal(result.begin(), result.end(), shape.begin()) || shape[0] * shape[1] > kMostRows ||
      selected[2] > INT32_MAX / 2 || shape[2] > INT32_MAX / kHeads) {
    return ffi::Error::InvalidArgument(
        "sparse_attention: queries and output are [R, T, H, 512], window [R, W, 584], positions and lengths "
        "[R, T], rows [R, T, K], sink [H]");
  }
  if (window_width < 0 || window_width > ring[1] || ring[1] > INT32_MAX) {
    return ffi::Error::InvalidArgument("sparse_attention: a window of " + std::to_string(window_width) +
                                       " tokens does not stand in " + std::to_string(ring[1]) + " rows");
  }
  if (page_entries <= 0 || row_step < page_entries || row_step > INT32_MAX || offset < 0 || offset % kWord ||
      stride % kWord || (selected[2] > 0 && offset + page_entries * kRowBytes > stride) ||
      slab.dimensions()[0] > INT32_MAX) {
    return ffi::Error::InvalidArgument("sparse_attention: pages of " + std::to_string(page_entries) +
                                       " rows at byte " + std::to_string(offset) + " of blocks of " +
                                       std::to_string(stride) + ", numbered by " + std::to_string(row_step) +
                                       ": bytes must be multiples of 16, and pages stay in their block");
  }
  const int64_t num_rows = shape[0] * shape[1], head_blocks = (shape[2] + kHeads - 1) / kHeads;
  if (num_rows == 0 || shape[2] == 0) return ffi::Error::Success();
  if (head_blocks > kMostRows) return ffi::Error::InvalidArgument("sparse_attention: too many heads");
  const int64_t tiles = (window_width + kKeys - 1) / kKeys + (selected[2] + kKeys - 1) / kKeys;
  ffi::Error error = CheckCuda(kName, "cudaSetDevice", cudaSetDevice(ordinal));
  if (error.failure()) return error;
  int cluster = 1;
  error = ChooseCluster(ordinal, num_rows * head_blocks, tiles, &cluster);
  if (error.failure()) return error;
  const Attending attending = {reinterpret_cast<const uint4*>(queries.untyped_data()),
                               window.typed_data(),
                               positions.typed_data(),
                               slab.typed_data(),
                               rows.typed_data(),
                               lengths.typed_data(),
                               sink.typed_data(),
                               reinterpret_cast<uint32_t*>(out->untyped_data()),
                               stride,
                               offset,
                               page_entries * kValueBytes,
                               static_cast<int>(slab.dimensions()[0]),
                               static_cast<int>(shape[2]),
                               static_cast<int>(shape[1]),
                               static_cast<int>(ring[1]),
                               static_cast<int>(window_width),
                               static_cast<int>(selected[2]),
                               static_cast<int>(page_entries),
                               static_cast<int>(row_step),
                               kLog2E / sqrtf(static_cast<float>(kChannels))};
  const dim3 grid(static_cast<unsigned>(cluster), static_cast<unsigned>(num_rows),
                  static_cast<unsigned>(head_blocks));
  return Launch(kName, stream, ordinal, grid, kThreads, cluster, sizeof(Shared), AttendKernel, attending);
}

auto BindSparseAttention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::Buffer<ffi::BF16, 4>>()  // queries [R, T, H, 512]
      .Arg<ffi::Buffer<ffi::U8, 3>>()    // window [R, W, 584]
      .Arg<ffi::Buffer<ffi::S32, 2>>()   // positions [R, T]
      .Arg<ffi::Buffer<ffi::U8, 2>>()    // slab [N, stride]
      .Arg<ffi::Buffer<ffi::S32, 3>>()   // rows [R, T, K]
      .Arg<ffi::Buffer<ffi::S32, 2>>()   // lengths [R, T]
      .Arg<ffi::Buffer<ffi::F32, 1>>()   // sink [H]
      .Ret<ffi::Buffer<ffi::BF16, 4>>()  // [R, T, H, 512]
      .Attr<int64_t>("window_width")
      .Attr<int64_t>("page_entries")
      .Attr<int64_t>("offset")
      .Attr<int64_t>("row_step");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_sparse_attention_cuda, SparseAttention, BindSparseAttention(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
