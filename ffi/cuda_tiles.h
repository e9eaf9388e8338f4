// What kernels that multiply fp8 rows have in common, and need assembly for: bytes on their way to shared
// memory, e4m3 numbers, products.
#ifndef HISPARSE_FFI_CUDA_TILES_H_
#define HISPARSE_FFI_CUDA_TILES_H_

#include <cuda_runtime.h>
// clang-format off: the others need it
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
// clang-format on

#include <cstdint>

#include "cuda_memory.h"

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

// sum += a b for 16 x 16 and 16 x 8 numbers of f16, as m16n8k16 has them in its lanes.
__device__ __forceinline__ void MultiplyF16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The larger of `x` and 0. NaN stays NaN, which `fmaxf` would take for 0.
__device__ __forceinline__ float Relu(float x) {
  float positive;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return positive;
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_CUDA_TILES_H_
