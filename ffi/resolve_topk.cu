// Where each selected entry stands, the swap-in plan, and the new map and LRU order. Rule and reference:
// pallas_kernels/ref.py.
//
// One block takes one request, all its query rows. Three dependent trips to memory: the indices, with the map
// and the LRU order, which only a request uses that has an entry in a hot slot; the entries' blocks; the
// results.
//
//   1. Each reference is classed. The host rows wanted go into a hash table in shared memory, and the first
//   reference
//      of each is noted. A request that wants none is done here: nothing depends on its map and LRU,
//      and neither is written.
//   2. Each slot looks its host row up in that table: a hit. What nothing hit is a miss, numbered in order of
//   first
//      reference by a prefix sum.
//   3. A prefix sum along the LRU order splits it into stale slots and slots hit. Miss i takes the i-th stale
//   slot.
//      The new order, built in shared memory, is unused stale slots | slots loaded | slots hit.
//
// Where a host row lands in the table depends on timing; nothing that leaves the block does.
#include <algorithm>
#include <climits>

#include "cuda_block.h"

namespace hisparse {
namespace {

constexpr int kMaxRefs = 4096;
constexpr int kMaxSlots = 32768;
constexpr int kUnused = -1;            // a free place of the table
constexpr uint16_t kNowhere = 0x7fff;  // a reference that needs no slot
constexpr uint16_t kLoads = 0x8000;    // marks the reference that loads its host row

struct Request {
  int query_rows, top_k, refs, pages, hot_pages, slots;
  int table_bits;
  int page_entries, row_step, num_host_blocks;

  __host__ __device__ int table_size() const { return 1 << table_bits; }
  __host__ __device__ int hit_words() const { return (slots + 31) / 32; }
  size_t shared_bytes() const {
    return sizeof(int) * (2 * static_cast<size_t>(table_size()) + hit_words() + query_rows) +
           sizeof(uint16_t) * (2 * static_cast<size_t>(refs) + slots);
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
  int resident, newest, wanting_slot, homeless, hit_slots;
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

// Four consecutive items from `first` on, `filler` past the end.
__device__ __forceinline__ int4 FourOf(const int32_t* items, int first, int count, int filler) {
  if (count % 4 == 0)
    return first < count ? LoadEarly(reinterpret_cast<const int4*>(items + first))
                         : int4{filler, filler, filler, filler};
  return {first < count ? items[first] : filler, first + 1 < count ? items[first + 1] : filler,
          first + 2 < count ? items[first + 2] : filler, first + 3 < count ? items[first + 3] : filler};
}
__device__ __forceinline__ short4 FourOf(const int16_t* items, int first, int count, short filler) {
  if (count % 4 == 0)
    return first < count ? LoadEarly(reinterpret_cast<const short4*>(items + first))
                         : short4{filler, filler, filler, filler};
  return {first < count ? items[first] : filler, first + 1 < count ? items[first + 1] : filler,
          first + 2 < count ? items[first + 2] : filler, first + 3 < count ? items[first + 3] : filler};
}

__global__ void __launch_bounds__(kThreads, 1) ResolveKernel(Operands in, Results out, Request shape) {
  extern __shared__ int shared[];
  __shared__ int scratch[kWarps];
  __shared__ Totals totals;
  Table table = {shared, shared + shape.table_size(), shape.table_bits};
  auto* slot_is_hit = reinterpret_cast<uint32_t*>(table.values + shape.table_size());  // a bit a slot
  int* num_valid = reinterpret_cast<int*>(slot_is_hit + shape.hit_words());
  auto* place_of = reinterpret_cast<uint16_t*>(num_valid + shape.query_rows);  // of each reference's host row
  uint16_t* victims = place_of + shape.refs;                                   // slot of each miss
  uint16_t* order = victims + shape.refs;                                      // the new LRU order

  const int thread = threadIdx.x;
  const int64_t request = blockIdx.x;
  const int refs = shape.refs, slots = shape.slots;
  in.topk += request * refs;
  in.num_entries += request * shape.query_rows;
  in.row_valid += request * shape.query_rows;
  in.resident += request * shape.pages;
  in.host += request * shape.pages;
  in.hot += request * shape.hot_pages;
  out.rows += request * refs;
  out.num_valid += request * shape.query_rows;
  out.host_rows += request * refs;
  out.dest_rows += request * refs;
  out.slots += request * refs;
  out.slot_host += request * slots;
  out.lru += request * slots;

  // 1. Class the references.
  int entry = thread < refs ? in.topk[thread] : -1;
  const int first_new = in.first_new[request];
  int4 held_first = FourOf(out.slot_host, thread * 4, slots, -1);
  short4 by_age = FourOf(out.lru, thread * 4, slots, -1);
  bool owned = true;
  for (int i = thread; i < shape.hot_pages; i += kThreads) owned = owned && in.hot[i] > 0;
  for (int i = thread; i < shape.table_size(); i += kThreads) {
    table.keys[i] = kUnused;
    table.values[i] = INT_MAX;
  }
  for (int i = thread; i < shape.hit_words(); i += kThreads) slot_is_hit[i] = 0;
  for (int i = thread; i < shape.query_rows; i += kThreads) num_valid[i] = 0;
  if (thread == 0) totals = {};
  const bool owns_region = __syncthreads_and(owned);

  bool wants_slot = false;
  for (int ref = thread; ref < refs; ref += kThreads) {
    const int line = ref / shape.top_k;
    const bool wanted = entry >= 0 && entry < in.num_entries[line] && in.row_valid[line];
    const int page = wanted ? entry / shape.page_entries : 0;
    const int slot = entry - page * shape.page_entries;
    const bool known = wanted && page < shape.pages;
    const int resident_block = known ? in.resident[page] : 0;
    const int host_block = known ? in.host[page] : 0;
    const bool is_new = entry >= first_new;
    uint16_t place = kNowhere;
    if (resident_block > 0) {
      out.rows[ref] = resident_block * shape.row_step + slot;
      atomicAdd(is_new ? &totals.newest : &totals.resident, 1);
      atomicAdd(&num_valid[line], 1);
    } else if (owns_region && host_block > 0 && host_block < shape.num_host_blocks && !is_new) {
      place = static_cast<uint16_t>(table.Insert(host_block * shape.page_entries + slot, ref));
      wants_slot = true;
      atomicAdd(&totals.wanting_slot, 1);
      atomicAdd(&num_valid[line], 1);
    } else {
      out.rows[ref] = -1;
      if (wanted) atomicAdd(&totals.homeless, 1);
    }
    place_of[ref] = place;
    if (ref + kThreads < refs) entry = in.topk[ref + kThreads];
  }
  const bool uses_slots = __syncthreads_or(wants_slot);

  int num_misses = 0;
  if (uses_slots) {
    // 2. Hits and misses.
    for (int first = thread * 4; first < slots; first += kThreads * 4) {
      const int4 four = first < kThreads * 4 ? held_first : FourOf(out.slot_host, first, slots, -1);
      const int held[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = held[i] >= 0 ? table.Find(held[i]) : -1;
        if (place < 0) continue;
        atomicMin(&table.values[place], ~(first + i));
        atomicOr(&slot_is_hit[(first + i) / 32], 1u << (first + i) % 32);
        atomicAdd(&totals.hit_slots, 1);
      }
    }
    __syncthreads();
    const int num_stale = slots - totals.hit_slots;
    for (int tile = 0; tile < refs; tile += kThreads) {
      const int ref = tile + thread;
      const uint16_t place = ref < refs ? place_of[ref] : kNowhere;
      const bool loads = place != kNowhere && table.values[place] == ref;
      int in_tile;
      const int miss = num_misses + ExclusiveSum(loads, scratch, &in_tile);
      if (loads) {  // a miss number is at most its first reference's, so no later reference takes it for its
                    // own
        table.values[place] = miss;
        place_of[ref] = place | kLoads;
      }
      num_misses += in_tile;
      __syncthreads();
    }

    // 3. Victims and the new order.
    int stale_before = 0;
    for (int tile = 0; tile < slots; tile += kThreads * 4) {
      const int first = tile + thread * 4;
      if (tile > 0) by_age = FourOf(out.lru, first, slots, -1);
      const int aged[4] = {by_age.x, by_age.y, by_age.z, by_age.w};
      bool stale[4];
      int num_here = 0, in_tile;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        stale[i] = aged[i] >= 0 && !(slot_is_hit[aged[i] / 32] >> aged[i] % 32 & 1);
        num_here += stale[i];
      }
      int rank = stale_before + ExclusiveSum(num_here, scratch, &in_tile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (aged[i] < 0) continue;
        int to = num_stale + first + i - rank;  // among the slots hit
        if (stale[i]) {
          if (rank < num_misses) victims[rank] = static_cast<uint16_t>(aged[i]);
          to = rank < num_misses ? num_stale - num_misses + rank : rank - num_misses;
          ++rank;
        }
        if (to < slots) order[to] = static_cast<uint16_t>(aged[i]);
      }
      stale_before += in_tile;
      __syncthreads();
    }

    for (int ref = thread; ref < refs; ref += kThreads) {
      const uint16_t place = place_of[ref];
      if (place == kNowhere) continue;
      const int value = table.values[place & ~kLoads];
      const int slot = value < 0 ? ~value : victims[value];
      const int row = in.hot[slot / shape.page_entries] * shape.row_step + slot % shape.page_entries;
      out.rows[ref] = row;
      if (place & kLoads) {
        const int host_row = table.keys[place & ~kLoads];
        out.host_rows[value] = host_row;
        out.dest_rows[value] = row;
        out.slots[value] = slot;
        out.slot_host[slot] = host_row;
      }
    }
    if (slots % 2 == 0) {
      auto* pairs = reinterpret_cast<uint32_t*>(out.lru);
      for (int i = thread; i < slots / 2; i += kThreads)
        pairs[i] = order[2 * i] | static_cast<uint32_t>(order[2 * i + 1]) << 16;
    } else {
      for (int i = thread; i < slots; i += kThreads) out.lru[i] = static_cast<int16_t>(order[i]);
    }
  }

  for (int i = num_misses + thread; i < refs; i += kThreads)
    out.host_rows[i] = out.dest_rows[i] = out.slots[i] = -1;
  for (int i = thread; i < shape.query_rows; i += kThreads) out.num_valid[i] = num_valid[i];
  if (thread == 0) {
    int num_rows = 0;
    for (int i = 0; i < shape.query_rows; ++i) num_rows += in.row_valid[i];
    int32_t* counts = out.counts + request * 5;
    counts[0] = totals.resident;
    counts[1] = totals.newest;
    counts[2] = totals.wanting_slot - num_misses;
    counts[3] = num_misses;
    counts[4] = num_rows * shape.top_k - totals.resident - totals.newest - totals.wanting_slot;
    out.num_misses[request] = num_misses;
    out.num_homeless[request] = totals.homeless;
  }
}

using Ints1 = ffi::Buffer<ffi::S32, 1>;
using Ints2 = ffi::Buffer<ffi::S32, 2>;
using Ints3 = ffi::Buffer<ffi::S32, 3>;
using Flags = ffi::Buffer<ffi::PRED, 2>;
using Order = ffi::Buffer<ffi::S16, 2>;

template <typename Buffer>
ffi::Error CopyUnlessSame(cudaStream_t stream, const Buffer& from, Buffer& to) {
  if (from.untyped_data() == to.untyped_data()) return ffi::Error::Success();
  return CheckCuda("resolve_topk", "cudaMemcpyAsync",
                   cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(),
                                   cudaMemcpyDeviceToDevice, stream));
}

ffi::Error ResolveTopk(cudaStream_t stream, int32_t ordinal, Ints3 topk, Ints2 num_entries, Flags row_valid,
                       Ints1 first_new, Ints2 resident, Ints2 host, Ints2 hot, Ints2 slot_host, Order lru,
                       ffi::Result<Ints2> rows, ffi::Result<Ints2> num_valid, ffi::Result<Ints2> host_rows,
                       ffi::Result<Ints2> dest_rows, ffi::Result<Ints2> slots, ffi::Result<Ints1> num_misses,
                       ffi::Result<Ints2> counts, ffi::Result<Ints1> num_homeless,
                       ffi::Result<Ints2> new_slot_host, ffi::Result<Order> new_lru, int64_t page_entries,
                       int64_t row_step, int64_t num_host_blocks) {
  const auto dims = topk.dimensions();
  const int64_t batch = dims[0], refs = dims[1] * dims[2], num_slots = lru.dimensions()[1];
  if (refs > kMaxRefs || num_slots > kMaxSlots || refs > num_slots) {
    return ffi::Error::InvalidArgument("resolve_topk: " + std::to_string(refs) + " references and " +
                                       std::to_string(num_slots) + " slots; at most " +
                                       std::to_string(kMaxRefs) + " and " + std::to_string(kMaxSlots) +
                                       ", and no fewer slots than references");
  }
  if (page_entries < 1 || hot.dimensions()[1] * page_entries < num_slots) {
    return ffi::Error::InvalidArgument("resolve_topk: the hot region is smaller than its slots");
  }
  if (batch == 0) return ffi::Error::Success();
  // Both are updated in place. XLA may give a result that is stored elsewhere at once (a scan's) another
  // buffer.
  ffi::Error error = CopyUnlessSame(stream, slot_host, *new_slot_host);
  if (error.success()) error = CopyUnlessSame(stream, lru, *new_lru);
  if (error.failure()) return error;
  Request shape = {};
  shape.query_rows = static_cast<int>(dims[1]);
  shape.top_k = static_cast<int>(dims[2]);
  shape.refs = static_cast<int>(refs);
  shape.pages = static_cast<int>(resident.dimensions()[1]);
  shape.hot_pages = static_cast<int>(hot.dimensions()[1]);
  shape.slots = static_cast<int>(num_slots);
  shape.table_bits = 5;  // four places a reference, two beyond 2,048
  while (shape.table_size() < std::min<int64_t>(4 * refs, 2 * kMaxRefs)) ++shape.table_bits;
  shape.page_entries = static_cast<int>(page_entries);
  shape.row_step = static_cast<int>(row_step);
  shape.num_host_blocks = static_cast<int>(num_host_blocks);
  const Operands in = {topk.typed_data(),      num_entries.typed_data(), row_valid.typed_data(),
                       first_new.typed_data(), resident.typed_data(),    host.typed_data(),
                       hot.typed_data()};
  const Results out = {rows->typed_data(),      num_valid->typed_data(),    host_rows->typed_data(),
                       dest_rows->typed_data(), slots->typed_data(),        num_misses->typed_data(),
                       counts->typed_data(),    num_homeless->typed_data(), new_slot_host->typed_data(),
                       new_lru->typed_data()};
  return Launch("resolve_topk", stream, ordinal, static_cast<int>(batch), 1, shape.shared_bytes(),
                &ResolveKernel, in, out, shape);
}

auto BindResolveTopk() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Ints3>()  // topk i32[B, Q, K]
      .Arg<Ints2>()  // num_entries i32[B, Q]
      .Arg<Flags>()  // row_valid bool[B, Q]
      .Arg<Ints1>()  // first_new i32[B]
      .Arg<Ints2>()  // resident i32[B, P]
      .Arg<Ints2>()  // host i32[B, P]
      .Arg<Ints2>()  // hot i32[B, HP]
      .Arg<Ints2>()  // slot_host i32[B, S]
      .Arg<Order>()  // lru i16[B, S]
      .Ret<Ints2>()  // rows i32[B, R], R = Q * K
      .Ret<Ints2>()  // num_valid i32[B, Q]
      .Ret<Ints2>()  // host_rows i32[B, R]
      .Ret<Ints2>()  // dest_rows i32[B, R]
      .Ret<Ints2>()  // slots i32[B, R]
      .Ret<Ints1>()  // num_misses i32[B]
      .Ret<Ints2>()  // counts i32[B, 5]
      .Ret<Ints1>()  // num_homeless i32[B]
      .Ret<Ints2>()  // slot_host, aliased
      .Ret<Order>()  // lru, aliased
      .Attr<int64_t>("page_entries")
      .Attr<int64_t>("row_step")
      .Attr<int64_t>("num_host_blocks");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_resolve_topk_cuda, ResolveTopk, BindResolveTopk(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
