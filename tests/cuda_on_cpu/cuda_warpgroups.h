// ffi/cuda_warpgroups.h without a GPU. A product reads its matrices when it begins, when it is waited for, or
// in between.
#ifndef HISPARSE_TESTS_CUDA_ON_CPU_CUDA_WARPGROUPS_H_
#define HISPARSE_TESTS_CUDA_ON_CPU_CUDA_WARPGROUPS_H_

#include "cuda_tiles.h"

namespace hisparse {

constexpr int kBlockColumns = 64, kBlockWords = 8;

struct Matrix {
  uint64_t byte, apart;  // of shared memory, and from one block to the next

  Matrix operator+(int words) const { return {byte + words * sizeof(uint4), apart}; }
};

inline Matrix RowsOf(const uint4* block) {
  const char* at = reinterpret_cast<const char*>(block);
  return {static_cast<uint64_t>(at - emulator::current->block->shared()), 0};
}

inline Matrix ColumnsOf(const uint4* block, int rows) {
  return {RowsOf(block).byte, rows * kBlockWords * sizeof(uint4)};
}

inline void OpenProducts() {}

inline void WaitForProducts() {
  for (const auto& product : emulator::current->products) product();
  emulator::current->products.clear();
}

// The number at a byte of shared memory, words exchanged as products have them.
inline float NumberAt(uint64_t byte) {
  uint16_t number;
  std::memcpy(&number, emulator::current->block->shared() + (byte ^ (byte >> 7 & 7) << 4), sizeof(number));
  return emulator::NumberOf(number);
}

template <bool kColumns, int kSums>
void MultiplyEither(float (&sums)[kSums], Matrix a, Matrix b, bool adds) {
  float* const to = sums;
  emulator::current->products.push_back([=] {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    for (int i = 0; i < kSums; ++i) {
      const uint64_t row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (!adds) to[i] = 0.0f;
      for (uint64_t k = 0; k < 16; ++k) {
        const uint64_t of_b =
            kColumns ? column / 64 * b.apart + k * 128 + column % 64 * 2 : column * 128 + k * 2;
        to[i] += NumberAt(a.byte + row * 128 + k * 2) * NumberAt(b.byte + of_b);
      }
    }
  });
  if (emulator::random() % 2) WaitForProducts();
}

inline void MultiplyRows(float (&sums)[32], Matrix a, Matrix b, bool adds) {
  MultiplyEither<false>(sums, a, b, adds);
}
inline void MultiplyColumns(float (&sums)[128], Matrix a, Matrix b) {
  MultiplyEither<true>(sums, a, b, true);
}

inline void Publish() {}

}  // namespace hisparse

#endif  // HISPARSE_TESTS_CUDA_ON_CPU_CUDA_WARPGROUPS_H_
