// What the movers of rows and pages between the slab and a pinned host pool have in common. Included by .cu
// files only.
//
// The GPU's own loads and stores move the bytes. Ids are read on the device, so every call may stand in a
// loop and be captured into a CUDA graph. One warp moves one row, or one piece of a page, in words of 16
// bytes where every address allows it; addresses are 64-bit. The references are in pallas_kernels/ref.py,
// under the same names.
#ifndef HISPARSE_FFI_ROWS_H_
#define HISPARSE_FFI_ROWS_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace hisparse::rows {

namespace ffi = xla::ffi;

using Bytes = ffi::Buffer<ffi::U8, 2>;
using Ids = ffi::Buffer<ffi::S32, 1>;

constexpr int kLanes = 32;
constexpr int kWarps = 8;  // of one block
constexpr int kThreads = kLanes * kWarps;
constexpr int kMostThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPieceWords = 4;  // words a lane moves at a time of a page piece, or of a row to store

// Words a row's values and scales, or a page, can be moved in: every address and size is a multiple of them.
inline int64_t WordBytes(uint64_t addresses) {
  for (int64_t bytes : {16, 8, 4}) {
    if (addresses % bytes == 0) return bytes;
  }
  return 1;
}

inline uint64_t Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

__device__ inline int64_t WarpNumber() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
__device__ inline int64_t NumWarps() { return int64_t{gridDim.x} * kWarps; }
__device__ inline int Lane() { return threadIdx.x % kLanes; }

template <typename T>
__device__ T* FromLane(T* pointer, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

// A page's place for rows: values of all rows first, then all scales.
struct RowShape {
  int64_t value_bytes;
  int64_t scale_bytes;
  int64_t page_entries;

  __host__ __device__ int64_t Values(int64_t slot) const { return value_bytes * slot; }
  __host__ __device__ int64_t Scales(int64_t slot) const {
    return value_bytes * page_entries + scale_bytes * slot;
  }
  bool Fits(int64_t bytes) const {
    return value_bytes > 0 && scale_bytes >= 0 && page_entries > 0 &&
           page_entries * (value_bytes + scale_bytes) <= bytes;
  }
};

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline ffi::Error Report(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(status));
}

inline ffi::Error Refuse(const char* what, const std::string& why) {
  return ffi::Error::InvalidArgument(std::string(what) + ": " + why);
}

// Never more blocks than there is work for, and at least one.
inline int64_t NumBlocks(int64_t most, int64_t items) {
  const int64_t needed = (items + kWarps - 1) / kWarps;
  return needed < most ? (needed < 1 ? 1 : needed) : (most < 1 ? 1 : most);
}

inline auto BindDevice() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

}  // namespace hisparse::rows

#endif  // HISPARSE_FFI_ROWS_H_
