// ffi/cuda_tiles.h without a GPU. A copy lands at once or when it is waited for.
#ifndef HISPARSE_TESTS_CUDA_ON_CPU_CUDA_TILES_H_
#define HISPARSE_TESTS_CUDA_ON_CPU_CUDA_TILES_H_

#include "cuda_memory.h"

namespace hisparse {

template <int kBytes>
void CopyAsync(void* to, const void* from, bool is_there) {
  if (reinterpret_cast<uintptr_t>(to) % kBytes || reinterpret_cast<uintptr_t>(from) % kBytes) {
    emulator::Fail("a copy's address is no multiple of its size");
  }
  const emulator::Copy copy = {to, from, kBytes, is_there};
  if (emulator::random() % 2) {
    copy.Land();
  } else {
    emulator::current->open.push_back(copy);
  }
}

inline void CloseGroup() {
  emulator::current->groups.push_back(std::move(emulator::current->open));
  emulator::current->open.clear();
}

template <int kOpen>
void WaitForGroups() {
  auto& groups = emulator::current->groups;
  while (groups.size() > kOpen) {
    for (const emulator::Copy& copy : groups.front()) copy.Land();
    groups.erase(groups.begin());
  }
}

inline uint32_t HalvesOf(uint32_t bits) {
  return emulator::HalfOf(bits & 0xff) | uint32_t{emulator::HalfOf(bits >> 8 & 0xff)} << 16;
}

inline void MultiplyF16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Given {
    const uint32_t* a;
    uint32_t b[2];
  } given{a, {b0, b1}};
  emulator::Together(&given, sum, [](emulator::Warp& warp) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Given& of_lane = emulator::GivenBy<Given>(warp, lane);
      const int group = lane / 4, quad = lane % 4;
      for (int i = 0; i < 8; ++i) {  // two numbers a word
        const auto number = [&](uint32_t word) {
          return emulator::NumberOfHalf(static_cast<uint16_t>(word >> i % 2 * 16));
        };
        left[group + i / 2 % 2 * 8][quad * 2 + i % 2 + i / 4 * 8] = number(of_lane.a[i / 2]);
        if (i < 4) right[quad * 2 + i % 2 + i / 2 * 8][group] = number(of_lane.b[i / 2]);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        float& result = emulator::TakenBy<float>(warp, lane)[i];
        for (int k = 0; k < 16; ++k) result += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
      }
    }
  });
}

inline float Relu(float x) { return std::isnan(x) ? x : max(x, 0.0f); }

}  // namespace hisparse

#endif  // HISPARSE_TESTS_CUDA_ON_CPU_CUDA_TILES_H_
