// Where each selected entry stands, the swap-in plan, and the new map and LRU order. Rule and reference:
// pallas_kernels/ref.py.
//
// One block takes one request, all its query rows, and reads what it needs at once: indices and bounds, block
// tables, hot region, map, LRU order. Tables too long for shared memory cost another trip for the blocks of
// the entries.
//
//   1. Each reference is classed. The host rows wanted go into a hash table in shared memory, and the first
//      reference of each is noted. A request that wants none is done here: nothing depends on its map and
//      LRU, and neither is written.
//   2. Each slot looks its host row up in that table: a hit. What nothing hit is a miss.
//   3. One prefix sum numbers the misses in order of first reference and splits the LRU order into stale
//   slots
//      and slots hit. Miss i takes the i-th stale slot. The new order is unused stale slots | slots loaded |
//      slots hit: the order of the split, its stale part turned by the number of misses.
//
// Where a host row lands in the table depends on timing; nothing that leaves the block does.
//
// `Fetch` hears of each miss when it has its number, and may start when victims are known, before the results
// are written: a kernel that also copies the rows has them on their way early. Several blocks may resolve the
// same request, each to copy a share of its rows; one of them writes, once all have read.
#ifndef HISPARSE_FFI_RESOLVE_KERNEL_H_
#define HISPARSE_FFI_RESOLVE_KERNEL_H_

#include "resolve_request.h"

namespace hisparse {

struct NoFetch {
  __device__ int Request() const { return blockIdx.x; }
  __device__ bool Writes() const { return true; }
  __device__ void Note(int, int) {}
  __device__ void Start(int, const uint16_t*, const int*) {}
  __device__ void AwaitReaders() {}
};

// `kPlain`: the shape `is_plain()`.
template <bool kPlain, typename Fetch>
__device__ __forceinline__ void Resolve(const Operands& in, const Results& out, const Request& shape,
                                        int* shared, Fetch& fetch) {
  constexpr int kThreads = kResolveThreads;
  __shared__ int scratch[2][kResolveWarps];
  __shared__ Totals totals;
  Table table = {shared, shared + shape.table_size(), shape.table_bits};
  int* held_resident = table.values + shape.table_size();
  int* held_host = held_resident + shape.held_pages();
  int* hot = held_host + shape.held_pages();
  int* num_valid = hot + Request::Padded(shape.hot_pages);
  auto* place_of =
      reinterpret_cast<uint16_t*>(num_valid + Request::Padded(shape.query_rows));  // by reference
  uint16_t* order = place_of + Request::Padded(shape.refs);  // stale slots, then slots hit
  auto* is_hit = reinterpret_cast<uint8_t*>(order + Request::Padded(shape.slots));  // by slot

  const int thread = threadIdx.x, request = fetch.Request();
  const bool writes = fetch.Writes();
  const int refs = shape.refs, slots = shape.slots, query_rows = kPlain ? 1 : shape.query_rows;
  const int64_t first_ref = int64_t{request} * refs, first_row = int64_t{request} * query_rows;
  const int32_t *topk = in.topk + first_ref, *bounds = in.num_entries + first_row;
  const bool* row_valid = in.row_valid + first_row;
  const int32_t *resident = in.resident + int64_t{request} * shape.pages,
                *host = in.host + int64_t{request} * shape.pages,
                *hot_blocks = in.hot + int64_t{request} * shape.hot_pages;
  int32_t *rows = out.rows + first_ref, *slot_host = out.slot_host + int64_t{request} * slots;
  int16_t* lru = out.lru + int64_t{request} * slots;
  const auto page_of = [&](int number) { return shape.page_entries.Quotient<kPlain>(number); };
  const auto line_of = [&](int ref) { return query_rows == 1 ? 0 : shape.top_k.Quotient<false>(ref); };

  // 1. Everything is on its way while the table is cleared; then class the references.
  int entry = -1, bound = 0, valid = 0;
  if (thread < refs) {
    entry = LoadEarly(topk + thread);
    bound = LoadEarly(bounds + line_of(thread));
    valid = LoadEarly(row_valid + line_of(thread));
  }
  const int first_new = LoadEarly(in.first_new + request);
  const bool holds_pages = kPlain || shape.held_pages() > 0;
  int page_resident = 0, page_host = 0, hot_block = 1;
  if (kPlain && thread < shape.pages) {
    page_resident = LoadEarly(resident + thread);
    page_host = LoadEarly(host + thread);
  }
  if (thread < shape.hot_pages) hot_block = LoadEarly(hot_blocks + thread);
  int4 four_held = LoadFour<kPlain, int4>(slot_host, thread * kEach, slots);
  short4 four_aged = LoadFour<kPlain, short4>(lru, thread * kEach, slots);
  ForMine<false>(shape.table_size() / 4, [&](int i) {
    reinterpret_cast<int4*>(table.keys)[i] = {kUnused, kUnused, kUnused, kUnused};
    reinterpret_cast<int4*>(table.values)[i] = {INT_MAX, INT_MAX, INT_MAX, INT_MAX};
  });
  ForMine<kPlain>(query_rows, [&](int i) { num_valid[i] = 0; });
  if (thread == 0) totals = {};
  if (kPlain) {
    if (thread < shape.pages) held_resident[thread] = page_resident, held_host[thread] = page_host;
  } else if (holds_pages) {
    ForMine<false>(shape.pages, [&](int i) { held_resident[i] = resident[i], held_host[i] = host[i]; });
  }
  bool owned = hot_block > 0;
  if (thread < shape.hot_pages) hot[thread] = hot_block;
  if (!kPlain) {
#pragma unroll 1
    for (int i = thread + kThreads; i < shape.hot_pages; i += kThreads) {
      hot[i] = hot_blocks[i];
      owned = owned && hot[i] > 0;
    }
  }
  const bool owns_region = __syncthreads_and(owned);

  bool wants_slot = false;
  int host_row = -1;  // of this thread's last reference
  uint16_t place = kNowhere;
  ForMine<kPlain>(refs, [&](int ref) {
    if (!kPlain && ref >= kThreads) {
      entry = topk[ref];
      bound = bounds[line_of(ref)];
      valid = row_valid[line_of(ref)];
    }
    const bool wanted = valid && entry >= 0 && entry < bound;
    const int page = wanted ? page_of(entry) : shape.pages;
    int resident_block = 0, host_block = 0;
    if (page < shape.pages) {
      resident_block = holds_pages ? held_resident[page] : resident[page];
      host_block = holds_pages ? held_host[page] : host[page];
    }
    const int slot = entry - page * shape.page_entries.value;
    const bool is_new = entry >= first_new;
    place = kNowhere;
    if (resident_block > 0) {
      if (writes) rows[ref] = resident_block * shape.row_step + slot;
      atomicAdd(is_new ? &totals.newest : &totals.resident, 1);
    } else if (owns_region && host_block > 0 && host_block < shape.num_host_blocks && !is_new) {
      host_row = host_block * shape.page_entries.value + slot;
      place = static_cast<uint16_t>(table.Insert(host_row, ref));
      wants_slot = true;
      atomicAdd(&totals.wanting_slot, 1);
    } else {
      if (writes) rows[ref] = -1;
      if (wanted) atomicAdd(&totals.homeless, 1);
    }
    if (query_rows > 1 && (resident_block > 0 || place != kNowhere)) atomicAdd(&num_valid[line_of(ref)], 1);
    place_of[ref] = place;
  });
  if (kPlain) {
    if (thread == 0) totals.valid_rows = valid;
  } else {
    ForMine<false>(query_rows, [&](int i) {
      if (row_valid[i]) atomicAdd(&totals.valid_rows, 1);
    });
  }
  const bool uses_slots = __syncthreads_or(wants_slot);

  int num_misses = 0;
  if (uses_slots) {
    // 2. Hits.
    int num_hit = 0;
    const auto find_hits = [&](int first) {
      const int held[kEach] = {four_held.x, four_held.y, four_held.z, four_held.w};
      int at[kEach], key[kEach];
      uint32_t open = 0, hit = 0;  // a bit a slot
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        at[i] = table.Home(held[i]);
        key[i] = table.keys[at[i]];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (key[i] == held[i]) hit |= 1u << i;
        if (key[i] != held[i] && key[i] != kUnused)
          open |= 1u << i;  // few: another row stands at its first place
      }
      while (open != 0) {
        const int i = __ffs(open) - 1;
        const int wanted = i == 0 ? held[0] : i == 1 ? held[1] : i == 2 ? held[2] : held[3];
        const int next = table.Next(i == 0 ? at[0] : i == 1 ? at[1] : i == 2 ? at[2] : at[3]);
        const int found = table.keys[next];
        if (i == 0) at[0] = next;
        if (i == 1) at[1] = next;
        if (i == 2) at[2] = next;
        if (i == 3) at[3] = next;
        if (found == wanted) hit |= 1u << i;
        if (found == wanted || found == kUnused) open &= open - 1;
      }
      uint32_t flags = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if ((hit >> i & 1) == 0 || held[i] < 0) continue;
        atomicMin(&table.values[at[i]], ~(first + i));
        flags |= 1u << 8 * i;
      }
      num_hit += __popc(flags);
      *reinterpret_cast<uint32_t*>(is_hit + first) = flags;  // `is_hit` is padded
    };
    if (thread * kEach < slots) find_hits(thread * kEach);
    if (!kPlain) {
#pragma unroll 1
      for (int first = (thread + kThreads) * kEach; first < slots; first += kThreads * kEach) {
        four_held = LoadFour<kPlain, int4>(slot_host, first, slots);
        find_hits(first);
      }
    }
    num_hit = __reduce_add_sync(kAllLanes, num_hit);
    if (thread % 32 == 0) atomicAdd(&totals.hit_slots, num_hit);
    __syncthreads();

    // 3. Misses numbered, the LRU order split.
    const int all_stale = slots - totals.hit_slots;
    const int last_tile = kPlain ? 0 : max((refs - 1) / kThreads, (slots - 1) / (kEach * kThreads));
    int num_stale = 0;
    for (int tile = 0; tile <= last_tile; ++tile) {
      const int ref = tile * kThreads + thread, first = ref * kEach;
      if (!kPlain && refs > kThreads) {
        place = ref < refs ? place_of[ref] : kNowhere;
        host_row = place != kNowhere ? table.keys[place] : -1;
      }
      const bool loads = place != kNowhere && (kPlain || ref < refs) && table.values[place] == ref;
      if (!kPlain && tile > 0) four_aged = LoadFour<kPlain, short4>(lru, first, slots);
      const int by_age[kEach] = {four_aged.x, four_aged.y, four_aged.z, four_aged.w};
      bool stale[kEach];
      int num_here = 0, in_tile;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        stale[i] = by_age[i] >= 0 && !is_hit[by_age[i]];
        num_here += stale[i];
      }
      const int before = ExclusiveSum<kResolveWarps>(num_here << 16 | loads, scratch[tile % 2], &in_tile);
      if (loads) {  // at most the number of its first reference: no later reference takes it for its own
        const int miss = num_misses + (before & 0xffff);
        fetch.Note(miss, host_row);
        table.values[place] = miss;
        place_of[ref] = place | kLoads;
      }
      int rank = num_stale + (before >> 16);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int to = stale[i] ? rank : all_stale + first + i - rank;
        if (by_age[i] >= 0 && to < slots) order[to] = static_cast<uint16_t>(by_age[i]);
        rank += stale[i];
      }
      num_misses += in_tile & 0xffff;
      num_stale += in_tile >> 16;
    }
    __syncthreads();
    fetch.Start(num_misses, order, hot);
    if (!writes) return;
    fetch.AwaitReaders();

    ForMine<kPlain>(refs, [&](int ref) {
      const uint16_t marked = place_of[ref], at = marked & static_cast<uint16_t>(~kLoads);
      if (at == kNowhere) return;
      const int value = table.values[at];
      const int slot = value < 0 ? ~value : order[value];
      const int page = page_of(slot);
      const int row = hot[page] * shape.row_step + slot - page * shape.page_entries.value;
      rows[ref] = row;
      if (marked & kLoads) {
        const int loaded = table.keys[at];
        out.host_rows[first_ref + value] = loaded;
        out.dest_rows[first_ref + value] = row;
        out.slots[first_ref + value] = slot;
        slot_host[slot] = loaded;
      }
    });
    const auto turned = [&](int i) {
      int from = i;
      if (i < num_stale) from = i + num_misses < num_stale ? i + num_misses : i + num_misses - num_stale;
      return order[from];
    };
    if (kPlain || slots % kEach == 0) {
#pragma unroll 1
      for (int i = thread * kEach; i < slots; i += kThreads * kEach) {
        const int last = i + kEach - 1;
        ushort4 four;
        if (last + num_misses < num_stale || i >= num_stale) {
          const uint16_t* from = order + (i >= num_stale ? i : i + num_misses);
          four = {from[0], from[1], from[2], from[3]};
        } else {
          four = {turned(i), turned(i + 1), turned(i + 2), turned(last)};
        }
        *reinterpret_cast<ushort4*>(lru + i) = four;
      }
    } else {
      ForMine<false>(slots, [&](int i) { lru[i] = static_cast<int16_t>(turned(i)); });
    }
  }

  if (!writes) return;
  ForMine<kPlain>(refs, [&](int i) {
    if (i >= num_misses)
      out.host_rows[first_ref + i] = out.dest_rows[first_ref + i] = out.slots[first_ref + i] = -1;
  });
  if (query_rows > 1) {
    ForMine<false>(query_rows, [&](int i) { out.num_valid[first_row + i] = num_valid[i]; });
  }
  if (thread == kThreads - 1) {
    const int num_placed = totals.resident + totals.newest + totals.wanting_slot;
    if (query_rows == 1) out.num_valid[request] = num_placed;
    int32_t* counts = out.counts + request * 5;
    counts[0] = totals.resident;
    counts[1] = totals.newest;
    counts[2] = totals.wanting_slot - num_misses;
    counts[3] = num_misses;
    counts[4] = totals.valid_rows * shape.top_k.value - num_placed;
    out.num_misses[request] = num_misses;
    out.num_homeless[request] = totals.homeless;
  }
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_RESOLVE_KERNEL_H_
