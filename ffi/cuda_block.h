// What the threads of one block do together.
#ifndef HISPARSE_FFI_CUDA_BLOCK_H_
#define HISPARSE_FFI_CUDA_BLOCK_H_

#include <cuda_runtime.h>

namespace hisparse {

constexpr unsigned kAllLanes = 0xffffffffu;

// Sum of `value` over the lanes up to this one.
__device__ __forceinline__ int LaneSum(int value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += before;
  }
  return value;
}

// Sum of `value` over the threads before this one of a block of `kWarps` warps; `*total` is the sum over all.
// One barrier inside: let another one pass before `scratch`, `kWarps` words of shared memory, is used again.
template <int kWarps>
__device__ __forceinline__ int ExclusiveSum(int value, int* scratch, int* total) {
  static_assert(kWarps <= 32);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sum = LaneSum(value);
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  const int of_warp = lane < kWarps ? scratch[lane] : 0;
  *total = __reduce_add_sync(kAllLanes, of_warp);
  return __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0) + sum - value;
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_CUDA_BLOCK_H_
