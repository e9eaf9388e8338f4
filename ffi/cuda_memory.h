// A block's dynamic shared memory, and loads that the compiler leaves where they are.
#ifndef HISPARSE_FFI_CUDA_MEMORY_H_
#define HISPARSE_FFI_CUDA_MEMORY_H_

#include <cuda_runtime.h>

namespace hisparse {

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* SharedMemory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// Loads that stay where they are written, so that they are on their way while other work is done.
__device__ __forceinline__ int4 LoadEarly(const int4* from) {
  int4 four;
  asm volatile("ld.global.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(from));
  return four;
}
__device__ __forceinline__ short4 LoadEarly(const short4* from) {
  short4 four;
  asm volatile("ld.global.v4.s16 {%0, %1, %2, %3}, [%4];"
               : "=h"(four.x), "=h"(four.y), "=h"(four.z), "=h"(four.w)
               : "l"(from));
  return four;
}
__device__ __forceinline__ int LoadEarly(const int* from) {
  int item;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(item) : "l"(from));
  return item;
}
__device__ __forceinline__ int LoadEarly(const bool* from) {
  int item;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(item) : "l"(from));
  return item;
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_CUDA_MEMORY_H_
