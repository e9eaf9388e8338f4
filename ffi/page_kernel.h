// Page copies by a kernel instead of DMA, for libraries that were built with nvcc.
#ifndef HISPARSE_FFI_PAGE_KERNEL_H_
#define HISPARSE_FFI_PAGE_KERNEL_H_

#include <cstdint>

namespace hisparse {

// Where pages are copied from and to. Passed by value: nothing has to outlive the call that enqueues it. A
// kernel's parameters hold 4 KB.
struct PagePlaces {
  static constexpr int64_t kMax = 250;
  int64_t count;
  const uint8_t* from[kMax];
  uint8_t* to[kMax];
};

// Enqueues the copies on `stream` (a cudaStream_t) of the current device; returns the launch's cudaError_t.
#ifdef HISPARSE_CUDA
constexpr bool kHasPageKernel = true;
int LaunchPageCopies(void* stream, const PagePlaces& places, int64_t page_bytes, int64_t num_blocks);
#else
constexpr bool kHasPageKernel = false;
inline int LaunchPageCopies(void*, const PagePlaces&, int64_t, int64_t) { return 1; }  // never called
#endif

}  // namespace hisparse

#endif  // HISPARSE_FFI_PAGE_KERNEL_H_
