// Enough of CUDA to run a kernel's source on a CPU: threads as coroutines, warps, barriers, clusters, copies
// and products that are late. It stands in for CUDA's headers, which the files beside it have the names of;
// those with names of ffi/ stand in for what is assembly there.
//
// What it is for: indices, layouts and the order of things. Warps run in a random order and for a random
// while, memory starts as NaN and becomes NaN when its block has left, and a copy or product takes place at
// once or when it is waited for, so a missing barrier or wait shows as wrong numbers. What it is not for:
// speed, rounding of the last bit, and what only the hardware does: which writes products see
// (`Publish`, `OpenProducts`), and 32 bits where 64 are needed, as arrays are small here.
#ifndef HISPARSE_TESTS_CUDA_ON_CPU_EMULATOR_H_
#define HISPARSE_TESTS_CUDA_ON_CPU_EMULATOR_H_

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __shared__ static  // blocks without a cluster run one after the other
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) short4 {
  int16_t x, y, z, w;
};
struct alignas(8) ushort4 {
  uint16_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulator {

[[noreturn]] inline void Fail(const char* why) {
  std::fprintf(stderr, "emulator: %s\n", why);
  std::abort();
}

// What threads meet at; `round` counts how often all of them have.
struct Barrier {
  int members = 0, arrived = 0;
  long round = 0;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool is_there;

  void Land() const {
    if (is_there) {
      std::memcpy(to, from, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
};

struct Warp;
struct Block;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 index, block_index;
  Warp* warp = nullptr;
  Block* block = nullptr;
  bool is_done = false;
  const Barrier* waits_at = nullptr;
  long round = 0;
  std::vector<std::vector<Copy>> groups;  // closed, the oldest first
  std::vector<Copy> open;
  std::vector<std::function<void()>> products;  // in flight
  const void* given = nullptr;                  // to what its warp does together
  void* taken = nullptr;
};

struct Warp {
  Thread* lanes[32];
  Barrier barrier;
};

struct Cluster {
  std::vector<Block*> blocks;
  Barrier barrier;
};

struct Block {
  std::vector<uint4> memory;
  Barrier barrier;
  int votes = 0, counted = 0, running = 0;
  Cluster* cluster = nullptr;

  char* shared() { return reinterpret_cast<char*>(memory.data()); }
};

constexpr uint4 kNothing = {~0u, ~0u, ~0u, ~0u};

inline Thread* current = nullptr;
inline dim3 grid;
inline ucontext_t scheduler;
inline const std::function<void()>* kernel = nullptr;
inline std::mt19937 random;

inline void Yield() { swapcontext(&current->context, &scheduler); }

// Waits for all others at a barrier; the last one to arrive does `work` first.
inline void Meet(Barrier& barrier, const std::function<void()>& work = [] {}) {
  if (++barrier.arrived == barrier.members) {
    work();
    barrier.arrived = 0;
    ++barrier.round;
    return;
  }
  current->waits_at = &barrier;
  current->round = barrier.round;
  Yield();  // until the round is over
}

// All lanes give something, and `work` fills what all of them take.
inline void Together(const void* given, void* taken, void (*work)(Warp&)) {
  Warp& warp = *current->warp;
  current->given = given;
  current->taken = taken;
  Meet(warp.barrier, [&] { work(warp); });
}

template <typename T>
const T& GivenBy(const Warp& warp, int lane) {
  return *static_cast<const T*>(warp.lanes[lane]->given);
}

template <typename T>
T* TakenBy(const Warp& warp, int lane) {
  return static_cast<T*>(warp.lanes[lane]->taken);
}

inline void Entry() {
  (*kernel)();
  for (const auto& group : current->groups) {
    if (!group.empty()) Fail("a thread ends while copies are on their way");
  }
  current->is_done = true;
  if (--current->block->running == 0) {  // another block that reads its memory from now on reads NaN
    std::fill(current->block->memory.begin(), current->block->memory.end(), kNothing);
  }
  Yield();
  Fail("a thread went on after its end");
}

// Runs the `cluster_size` blocks from `first` on, of `threads` each. `seed` is that of the order of warps.
inline void RunCluster(int cluster_size, dim3 first, int threads, size_t shared_bytes, unsigned seed,
                       const std::function<void()>& body) {
  constexpr size_t kStack = 64 * 1024;
  constexpr int kMostTurns = 100'000;  // of all warps
  kernel = &body;
  Cluster cluster;
  std::vector<Block> blocks(cluster_size);
  std::vector<Warp> warps(cluster_size * threads / 32);
  std::vector<Thread> all(cluster_size * threads);
  cluster.barrier.members = static_cast<int>(all.size());
  for (Block& block : blocks) {
    block.memory.assign((shared_bytes + 15) / 16, kNothing);
    block.barrier.members = block.running = threads;
    block.cluster = &cluster;
    cluster.blocks.push_back(&block);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    Thread& thread = all[i];
    const unsigned rank = static_cast<unsigned>(i) / threads;
    thread.index = {static_cast<unsigned>(i) % threads, 0, 0};
    thread.block_index = {first.x + rank, first.y, first.z};
    thread.block = &blocks[rank];
    thread.warp = &warps[i / 32];
    thread.warp->lanes[i % 32] = &thread;
    thread.warp->barrier.members = 32;
    thread.stack = std::make_unique_for_overwrite<char[]>(kStack);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, Entry, 0);
  }
  random.seed(seed);
  std::vector<Warp*> order;
  for (Warp& warp : warps) order.push_back(&warp);
  for (int turn = 0;; ++turn) {
    std::shuffle(order.begin(), order.end(), random);
    bool is_over = true;
    for (Warp* warp : order) {
      const int rounds = 1 + static_cast<int>(random() % 40);
      for (int round = 0; round < rounds; ++round) {
        for (Thread* lane : warp->lanes) {
          if (lane->is_done) continue;
          is_over = false;
          if (lane->waits_at != nullptr && lane->waits_at->round == lane->round) continue;
          lane->waits_at = nullptr;
          current = lane;
          swapcontext(&scheduler, &lane->context);
        }
      }
    }
    if (is_over) return;
    if (turn == kMostTurns) Fail("threads wait for each other");
  }
}

inline float NumberOf(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

inline uint16_t Bf16Of(float number) {  // to nearest even
  if (std::isnan(number)) return 0x7fff;
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The float of an f16 number that is an e4m3 number.
inline float NumberOfHalf(uint16_t half) {
  if ((half & 0x7fff) > 0x7c00) return NAN;
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : 0.0f;
  return half & 0x8000 ? -size : size;
}

inline uint16_t HalfOf(uint8_t e4m3) {
  const uint16_t sign = static_cast<uint16_t>((e4m3 & 0x80) << 8);
  int exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
  if ((e4m3 & 0x7f) == 0x7f) return sign | 0x7fff;
  if (exponent == 0) {  // 2^-9 times the mantissa, which f16 has as a normal number
    if (mantissa == 0) return sign;
    for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
    mantissa &= 7;
  }
  return static_cast<uint16_t>(sign | (exponent + 8) << 10 | mantissa << 7);
}

}  // namespace emulator

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block_index)
#define gridDim (emulator::grid)

using std::max;
using std::min;

inline void __syncthreads() { emulator::Meet(emulator::current->block->barrier); }

template <typename T>
T __ldg(const T* from) {
  return *from;
}

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline uint32_t __float_as_uint(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

inline int __clz(uint32_t bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return bits ? __builtin_ctz(static_cast<unsigned>(bits)) + 1 : 0; }

inline float __uint_as_float(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

// Every lane gets the value of the lane that it names.
template <typename T>
T FromLane(T value, int lane) {
  struct Given {
    T value;
    int from;
  } given{value, lane};
  T taken;
  emulator::Together(&given, &taken, [](emulator::Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      const int from = emulator::GivenBy<Given>(warp, lane).from;
      *emulator::TakenBy<T>(warp, lane) = emulator::GivenBy<Given>(warp, from).value;
    }
  });
  return taken;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return FromLane(value, lane % 32);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return FromLane(value, static_cast<int>(threadIdx.x % 32) ^ mask);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  const int lane = threadIdx.x % 32;
  return FromLane(value, max(lane - lanes, 0));
}

// All lanes get what `kOf` makes of their values, in their order.
template <auto kOf, typename T>
T OfWarp(T mine) {
  T all = mine;
  emulator::Together(&mine, &all, [](emulator::Warp& warp) {
    T of_all = emulator::GivenBy<T>(warp, 0);
    for (int lane = 1; lane < 32; ++lane) of_all = kOf(of_all, emulator::GivenBy<T>(warp, lane));
    for (int lane = 0; lane < 32; ++lane) *emulator::TakenBy<T>(warp, lane) = of_all;
  });
  return all;
}

template <typename T>
T __reduce_add_sync(unsigned, T mine) {
  return OfWarp<[](T a, T b) { return a + b; }>(mine);
}
template <typename T>
T __reduce_max_sync(unsigned, T mine) {
  return OfWarp<[](T a, T b) { return max(a, b); }>(mine);
}
template <typename T>
T __reduce_min_sync(unsigned, T mine) {
  return OfWarp<[](T a, T b) { return min(a, b); }>(mine);
}
inline unsigned __ballot_sync(unsigned mask, bool mine) {
  return __reduce_add_sync(mask, unsigned{mine} << threadIdx.x % 32);
}
inline bool __any_sync(unsigned mask, bool mine) { return __ballot_sync(mask, mine) != 0; }

// How many of a block's threads say yes; nobody votes again before all have read it.
inline int Votes(bool mine) {
  emulator::Block& block = *emulator::current->block;
  block.votes += mine;
  emulator::Meet(block.barrier, [&] { block.counted = std::exchange(block.votes, 0); });
  return block.counted;
}
inline bool __syncthreads_and(bool mine) { return Votes(mine) == emulator::current->block->barrier.members; }
inline bool __syncthreads_or(bool mine) { return Votes(mine) > 0; }

// Nothing runs between a coroutine's read and its write.
template <typename T>
T atomicAdd(T* at, T number) {
  return std::exchange(*at, *at + number);
}
template <typename T>
T atomicOr(T* at, T bits) {
  return std::exchange(*at, *at | bits);
}
template <typename T>
T atomicMin(T* at, T number) {
  return std::exchange(*at, min(*at, number));
}
template <typename T>
T atomicCAS(T* at, T expected, T number) {
  return *at == expected ? std::exchange(*at, number) : *at;
}

struct __nv_bfloat16 {
  uint16_t bits;

  operator float() const { return emulator::NumberOf(bits); }
};
struct __nv_bfloat162 {
  uint16_t x, y;
};
struct __half2 {
  uint16_t x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {emulator::Bf16Of(x), emulator::Bf16Of(y)};
}
inline float2 __half22float2(__half2 halves) {
  return {emulator::NumberOfHalf(halves.x), emulator::NumberOfHalf(halves.y)};
}

namespace cooperative_groups {

struct cluster_group {
  void sync() const { emulator::Meet(emulator::current->block->cluster->barrier); }
  unsigned num_blocks() const {
    return static_cast<unsigned>(emulator::current->block->cluster->blocks.size());
  }
  unsigned block_rank() const { return emulator::current->block_index.x % num_blocks(); }

  template <typename T>
  T* map_shared_rank(T* mine, int rank) const {
    emulator::Block& block = *emulator::current->block;
    return reinterpret_cast<T*>(block.cluster->blocks[rank]->shared() +
                                (reinterpret_cast<char*>(mine) - block.shared()));
  }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups

#endif  // HISPARSE_TESTS_CUDA_ON_CPU_EMULATOR_H_
