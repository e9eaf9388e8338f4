// ffi/cuda_memory.h without a GPU.
#ifndef HISPARSE_TESTS_CUDA_ON_CPU_CUDA_MEMORY_H_
#define HISPARSE_TESTS_CUDA_ON_CPU_CUDA_MEMORY_H_

#include <type_traits>

#include "emulator.h"

namespace hisparse {

template <typename T>
auto LoadEarly(const T* from) {
  if constexpr (std::is_same_v<T, bool>) {
    return int{*from};
  } else {
    return *from;
  }
}

inline unsigned char* SharedMemory() {
  return reinterpret_cast<unsigned char*>(emulator::current->block->shared());
}

}  // namespace hisparse

#endif  // HISPARSE_TESTS_CUDA_ON_CPU_CUDA_MEMORY_H_
