// How blocks are launched. Included by .cu files only.
#ifndef HISPARSE_FFI_CUDA_LAUNCH_H_
#define HISPARSE_FFI_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace hisparse {

namespace ffi = xla::ffi;

inline ffi::Error CheckCuda(const char* what, const char* function, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + function + ": " + cudaGetErrorString(status));
}

// Clusters of `size` blocks along x.
inline cudaLaunchAttribute ClustersOf(int size) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(size);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Launches a grid of `blocks` of `threads`, in clusters of `cluster` along x, with `shared_bytes` of dynamic
// shared memory.
template <typename... Parameters, typename... Arguments>
ffi::Error Launch(const char* what, cudaStream_t stream, int ordinal, dim3 blocks, int threads, int cluster,
                  size_t shared_bytes, void (*kernel)(Parameters...), Arguments... arguments) {
  ffi::Error error = CheckCuda(what, "cudaSetDevice", cudaSetDevice(ordinal));
  if (error.failure()) return error;
  if (shared_bytes > 16 * 1024) {  // a kernel has 48 KiB without asking, its static part included
    error = CheckCuda(what, "cudaFuncSetAttribute",
                      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes)));
    if (error.failure()) return error;
  }
  cudaLaunchAttribute attribute = ClustersOf(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return CheckCuda(what, "cudaLaunchKernelEx", cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_CUDA_LAUNCH_H_
