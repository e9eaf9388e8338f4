// What resolve_kernel.h works on: the shape of a request, operands and results, the table of wanted host
// rows, and loads by a whole block.
#ifndef HISPARSE_FFI_RESOLVE_REQUEST_H_
#define HISPARSE_FFI_RESOLVE_REQUEST_H_

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cuda_block.h"
#include "cuda_memory.h"

namespace hisparse {

constexpr int kResolveThreads = 1024;
constexpr int kResolveWarps = kResolveThreads / 32;
constexpr int kEach = 4;             // neighbouring slots a thread takes at a time
constexpr int kMaxHeldPages = 4096;  // block tables up to here are held in shared memory
constexpr int kMaxRefs = 4096;
constexpr int kMaxSlots = 32768;
constexpr int kUnused = -1;            // a free place of the table
constexpr uint16_t kNowhere = 0x7fff;  // a reference that needs no slot
constexpr uint16_t kLoads = 0x8000;    // marks the reference that loads its host row

// Divides what is not negative; by a shift where it can.
struct Divisor {
  int value, shift;

  explicit Divisor(int64_t divisor) : value(static_cast<int>(divisor)), shift(-1) {
    for (int bit = 0; bit < 31; ++bit) {
      if (value == 1 << bit) shift = bit;
    }
  }
  template <bool kShift>  // known to be a power of two
  __device__ int Quotient(int x) const {
    return kShift || shift >= 0 ? x >> shift : x / value;
  }
};

struct Request {
  int query_rows, refs, pages, hot_pages, slots;
  int table_bits;
  Divisor top_k, page_entries;
  int row_step, num_host_blocks;

  static Request Of(int query_rows, int top_k, int pages, int hot_pages, int slots, int64_t page_entries,
                    int row_step, int num_host_blocks) {
    const int refs = query_rows * top_k;
    int table_bits = 5;  // eight places a reference, two beyond 2,048
    while (1 << table_bits < std::min(8 * refs, 2 * kMaxRefs)) ++table_bits;
    return {query_rows, refs,           pages,          hot_pages,
            slots,      table_bits,     Divisor(top_k), Divisor(page_entries),
            row_step,   num_host_blocks};
  }

  __host__ __device__ int table_size() const { return 1 << table_bits; }
  __host__ __device__ static int Padded(int count) {
    return (count + 7) / 8 * 8;
  }  // whole 16 bytes of any type
  // The shape of most decode steps, for which the kernel is compiled apart: one query row, every table read
  // in one go. What takes the time is the number of instructions that a block has to issue.
  bool is_plain() const {
    return query_rows == 1 && refs <= kResolveThreads && slots <= kEach * kResolveThreads && slots % 8 == 0 &&
           pages <= kResolveThreads && hot_pages <= kResolveThreads && page_entries.shift >= 0;
  }

  __host__ __device__ int held_pages() const { return pages <= kMaxHeldPages ? Padded(pages) : 0; }
  size_t shared_bytes() const {
    return sizeof(int) * (2 * static_cast<size_t>(table_size()) + 2 * held_pages() + Padded(hot_pages) +
                          Padded(query_rows)) +
           sizeof(uint16_t) * (Padded(refs) + Padded(slots)) + Padded(slots);
  }
};

struct Operands {
  const int32_t *topk, *num_entries;
  const bool* row_valid;
  const int32_t *first_new, *resident, *host, *hot;
};

struct Results {
  int32_t *rows, *num_valid, *host_rows, *dest_rows, *slots, *num_misses, *counts, *num_homeless;
  int32_t* slot_host;  // in place
  int16_t* lru;        // in place
};

struct Totals {
  int resident, newest, wanting_slot, homeless, hit_slots, valid_rows;
};

// Host rows wanted by the request: open addressing, at most half full.
struct Table {
  int* keys;
  int* values;  // first reference; then ~slot where one holds it, else the number of the miss
  int bits;

  __device__ int Home(int key) const {
    return static_cast<int>((static_cast<uint32_t>(key) * 2654435769u) >> (32 - bits));
  }
  __device__ int Next(int place) const { return (place + 1) & ((1 << bits) - 1); }

  __device__ int Insert(int key, int reference) {
    int place = Home(key);
    for (;; place = Next(place)) {
      const int held = atomicCAS(&keys[place], kUnused, key);
      if (held == kUnused || held == key) break;
    }
    atomicMin(&values[place], reference);
    return place;
  }

  __device__ int Find(int key) const {
    for (int place = Home(key);; place = Next(place)) {
      const int held = keys[place];
      if (held == key) return place;
      if (held == kUnused) return -1;
    }
  }
};

// Four neighbours from `first` on, -1 past the end.
template <bool kPlain, typename Four, typename Item>
__device__ __forceinline__ Four LoadFour(const Item* items, int first, int count) {
  static_assert(kEach == 4);
  if (kPlain || count % 4 == 0) {
    return first < count ? LoadEarly(reinterpret_cast<const Four*>(items + first)) : Four{-1, -1, -1, -1};
  }
  const auto item = [&](int i) { return first + i < count ? items[first + i] : Item{-1}; };
  return {item(0), item(1), item(2), item(3)};
}

// Calls `visit(i)` for every `step`-th i below `count` that is this thread's; at most one where that is
// known.
template <bool kAtMostOne, typename Visit>
__device__ __forceinline__ void ForMine(int count, Visit visit) {
  if constexpr (kAtMostOne) {
    if (static_cast<int>(threadIdx.x) < count) visit(static_cast<int>(threadIdx.x));
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kResolveThreads) visit(i);
  }
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_RESOLVE_REQUEST_H_
