// What kernels that multiply fp8 rows have in common: bytes on their way to shared memory, and e4m3 numbers.
// Included by .cu files only.
#ifndef HISPARSE_FFI_CUDA_TILES_H_
#define HISPARSE_FFI_CUDA_TILES_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace hisparse {

__device__ __forceinline__ uint32_t AddressOf(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Sends `kBytes` on their way to shared memory, or as many zeros; `from` must be an address of the array all
// the same. They are there once the group that `CloseGroup` ends has been waited for.
template <int kBytes>
__device__ __forceinline__ void CopyAsync(void* to, const void* from, bool is_there) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(AddressOf(to)), "l"(from),
                 "r"(is_there ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(AddressOf(to)), "l"(from), "n"(kBytes),
                 "r"(is_there ? kBytes : 0)
                 : "memory");
  }
}

__device__ __forceinline__ void CloseGroup() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all of this thread's groups but the last `kOpen` are there.
template <int kOpen>
__device__ __forceinline__ void WaitForGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

// Two e4m3 numbers, the low bytes of `bits`, as two f16 numbers.
__device__ __forceinline__ uint32_t HalvesOf(uint32_t bits) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bits)));
  return halves;
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_CUDA_TILES_H_
