// Rows of host pages to rows of the slab or of a staging buffer, each list's wanted items counted or not.
//
// An id list is mostly padding: each warp takes every `warps`-th id, or, where the wanted ids of each list
// are counted, its part of those alone. No request is served by one block.
#include "rows.h"

namespace hisparse {
namespace {

using namespace rows;

constexpr int kWordsInFlight = 2;  // words of each row in flight that a lane loads at a time
constexpr int kMaxLists = 1024;    // lists whose lengths a block holds

// Copies `words` words of up to kRows places, all loads before all stores; a null source gives zeros,
// a null target is skipped.
template <typename Word, int kRows>
__device__ void CopyRows(const uint8_t* const (&from)[kRows], uint8_t* const (&to)[kRows], int words) {
  for (int first = 0; first < words; first += kLanes * kWordsInFlight) {
    Word held[kRows][kWordsInFlight];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int part = 0; part < kWordsInFlight; ++part) {
        const int word = first + part * kLanes + Lane();
        held[row][part] = Word{};
        if (from[row] != nullptr && word < words) {
          held[row][part] = __ldcs(reinterpret_cast<const Word*>(from[row]) + word);
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int part = 0; part < kWordsInFlight; ++part) {
        const int word = first + part * kLanes + Lane();
        if (to[row] != nullptr && word < words) reinterpret_cast<Word*>(to[row])[word] = held[row][part];
      }
    }
  }
}

struct Gather {
  const uint8_t* pool;
  uint8_t* dest;
  const int32_t* host_rows;
  const int32_t* dest_rows;
  const int32_t* lengths;  // wanted items of each list, at its front
  int32_t num_lists;       // 0: not counted
  int64_t count;           // items of all lists
  RowShape row;
  int64_t page_bytes;  // of the pool
  int64_t stride;      // of dest
  int64_t offset;
  int64_t row_step;
  int64_t num_host_rows;
  int64_t num_dest_rows;
};

// before[l] = wanted items of the lists before l; by the first warp.
__device__ void SumLengths(const Gather& g, int32_t* before) {
  const int64_t longest = g.count / g.num_lists;
  int32_t sum = 0;
  if (Lane() == 0) before[0] = 0;
  for (int32_t first = 0; first < g.num_lists; first += kLanes) {
    const int32_t list = first + Lane();
    int32_t here = 0;
    if (list < g.num_lists) {
      const int32_t length = g.lengths[list];
      here = length < 0 ? 0 : length < longest ? length : static_cast<int32_t>(longest);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const int32_t earlier = __shfl_up_sync(kAllLanes, here, step);
      if (Lane() >= step) here += earlier;
    }
    if (list < g.num_lists) before[list + 1] = sum + here;
    sum += __shfl_sync(kAllLanes, here, kLanes - 1);
  }
}

// Where the `number`-th wanted item stands among all items.
__device__ int64_t Place(const Gather& g, const int32_t* before, int32_t number) {
  int32_t low = 0, high = g.num_lists - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (before[middle] <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low * (g.count / g.num_lists) + number - before[low];
}

// Where the wanted items of each list are counted, blocks share them evenly, each a run of neighbours. Else
// each warp takes every `warps`-th item. The scale load goes out with the value loads: both are in flight
// before the first store.
template <typename Value, typename Scale, int kRows>
__global__ void __launch_bounds__(kRows > 2 ? kThreads : kMostThreads) GatherKernel(const Gather g) {
  __shared__ int32_t before[kMaxLists + 1];
  const bool counted = g.num_lists > 0;
  const int64_t warp = threadIdx.x / kLanes, warps = blockDim.x / kLanes;
  int64_t first = blockIdx.x * warps + warp, step = gridDim.x * warps, end = g.count;
  if (counted) {
    if (threadIdx.x < kLanes) SumLengths(g, before);
    __syncthreads();
    const int64_t total = before[g.num_lists], share = (total + gridDim.x - 1) / gridDim.x;
    first = blockIdx.x * share + warp;
    step = warps;
    end = min((blockIdx.x + 1) * share, total);
  }
  const int value_words = static_cast<int>(g.row.value_bytes / sizeof(Value));
  const int scale_words = static_cast<int>(g.row.scale_bytes / sizeof(Scale));
  for (int64_t begin = first; begin < end; begin += kLanes * step) {
    const int64_t number = begin + Lane() * step;
    int32_t host_row = -1, dest_row = -1;
    if (number < end) {
      const int64_t item = counted ? Place(g, before, static_cast<int32_t>(number)) : number;
      host_row = g.host_rows[item];
      dest_row = g.dest_rows[item];
    }
    const bool wanted = host_row >= 0 && dest_row >= 0 && dest_row < g.num_dest_rows;
    const uint8_t *values_from = nullptr, *scales_from = nullptr;
    uint8_t *values_to = nullptr, *scales_to = nullptr;
    if (wanted) {
      if (host_row < g.num_host_rows) {
        const int32_t entries = static_cast<int32_t>(g.row.page_entries);
        const uint8_t* page = g.pool + int64_t{host_row / entries} * g.page_bytes;
        values_from = page + g.row.Values(host_row % entries);
        scales_from = page + g.row.Scales(host_row % entries);
      }
      const int32_t step = static_cast<int32_t>(g.row_step);
      uint8_t* page = g.dest + int64_t{dest_row / step} * g.stride + g.offset;
      values_to = page + g.row.Values(dest_row % step);
      scales_to = page + g.row.Scales(dest_row % step);
    }
    unsigned todo = __ballot_sync(kAllLanes, wanted);
    while (todo != 0) {
      const uint8_t *from[kRows], *scale_from[kRows];
      uint8_t *to[kRows], *scale_to[kRows];
      Scale scale[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const bool one = todo != 0;
        const int lane = one ? __ffs(todo) - 1 : 0;
        todo &= todo - 1;
        from[row] = FromLane(values_from, lane);
        to[row] = FromLane(values_to, lane);
        scale_from[row] = FromLane(scales_from, lane);
        scale_to[row] = FromLane(scales_to, lane);
        if (!one) from[row] = scale_from[row] = to[row] = scale_to[row] = nullptr;
        scale[row] = Scale{};
        if (scale_from[row] != nullptr && Lane() < scale_words) {
          scale[row] = __ldcs(reinterpret_cast<const Scale*>(scale_from[row]) + Lane());
        }
      }
      CopyRows<Value, kRows>(from, to, value_words);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (scale_to[row] != nullptr && Lane() < scale_words) {
          reinterpret_cast<Scale*>(scale_to[row])[Lane()] = scale[row];
        }
      }
      for (int word = kLanes + Lane(); word < scale_words; word += kLanes) {  // more scales than lanes: rare
        for (int row = 0; row < kRows; ++row) {
          if (scale_to[row] == nullptr) continue;
          Scale more{};
          if (scale_from[row] != nullptr) more = reinterpret_cast<const Scale*>(scale_from[row])[word];
          reinterpret_cast<Scale*>(scale_to[row])[word] = more;
        }
      }
    }
  }
}

template <int kRows>
auto GatherOf(int64_t value_word, int64_t scale_word) {
  if (value_word == 16) {
    return scale_word >= 8 ? GatherKernel<uint4, uint2, kRows> : GatherKernel<uint4, uint8_t, kRows>;
  }
  if (value_word == 1) return GatherKernel<uint8_t, uint8_t, kRows>;
  return scale_word >= 4 ? GatherKernel<uint32_t, uint32_t, kRows> : GatherKernel<uint32_t, uint8_t, kRows>;
}

ffi::Error GatherRows(cudaStream_t stream, int32_t device, Bytes pool, Bytes dest_in, Ids host_rows,
                      Ids dest_rows, Ids lengths, ffi::Result<Bytes> dest, int64_t value_bytes,
                      int64_t scale_bytes, int64_t page_entries, int64_t offset, int64_t row_step,
                      int64_t num_blocks, int64_t warps, int64_t rows_in_flight) {
  const char* what = "gather_rows";
  const int64_t page_bytes = pool.dimensions()[1], stride = dest->dimensions()[1];
  const RowShape row{value_bytes, scale_bytes, page_entries};
  if (dest->untyped_data() != dest_in.untyped_data()) return Refuse(what, "alias dest with its operand.");
  if (host_rows.element_count() != dest_rows.element_count()) {
    return Refuse(what, std::to_string(host_rows.element_count()) + " host rows, " +
                            std::to_string(dest_rows.element_count()) + " destination rows.");
  }
  const auto num_lists = static_cast<int64_t>(lengths.element_count());
  const auto count = static_cast<int64_t>(host_rows.element_count());
  if (num_lists > kMaxLists || (num_lists > 0 && count % num_lists != 0) || count > INT32_MAX) {
    return Refuse(what, std::to_string(count) + " items in " + std::to_string(num_lists) +
                            " lists; at most " + std::to_string(kMaxLists) + " of one length each.");
  }
  if (warps < 1 || warps > (rows_in_flight > 2 ? kWarps : kMostThreads / kLanes)) {
    return Refuse(what, std::to_string(warps) + " warps with " + std::to_string(rows_in_flight) +
                            " rows in flight each: at most 32, and 8 with more than 2 rows.");
  }
  if (!row.Fits(page_bytes)) return Refuse(what, "rows exceed the page of " + std::to_string(page_bytes));
  if (offset < 0 || row_step < 1) return Refuse(what, "offset is negative or row_step below 1.");
  Gather g{pool.typed_data(),
           dest->typed_data(),
           host_rows.typed_data(),
           dest_rows.typed_data(),
           lengths.typed_data(),
           static_cast<int32_t>(num_lists),
           count,
           row,
           page_bytes,
           stride,
           offset,
           row_step,
           pool.dimensions()[0] * page_entries,
           dest->dimensions()[0] * row_step};
  const uint64_t places = Address(g.pool) | Address(g.dest) | page_bytes | stride | offset;
  const int64_t value_word = WordBytes(places | value_bytes);
  const int64_t scale_word = WordBytes(places | (value_bytes * page_entries) | scale_bytes);
  if (cudaError_t status = cudaSetDevice(device); status != cudaSuccess) return Report(what, status);
  const int64_t blocks = NumBlocks(num_blocks, g.count);
  const int threads = static_cast<int>(warps) * kLanes;
  switch (rows_in_flight) {
    case 1:
      return Report(what, Launch(GatherOf<1>(value_word, scale_word), blocks, threads, stream, g));
    case 2:
      return Report(what, Launch(GatherOf<2>(value_word, scale_word), blocks, threads, stream, g));
    default:
      return Report(what, Launch(GatherOf<4>(value_word, scale_word), blocks, threads, stream, g));
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_gather_rows_cuda, GatherRows,
                              BindDevice()
                                  .Arg<Bytes>()  // pool u8[H, page_bytes]
                                  .Arg<Bytes>()  // dest u8[N, stride]
                                  .Arg<Ids>()    // host rows i32[M]
                                  .Arg<Ids>()    // dest rows i32[M]
                                  .Arg<Ids>()    // wanted items of each list i32[L]; L = 0: not counted
                                  .Ret<Bytes>()  // dest, aliased
                                  .Attr<int64_t>("value_bytes")
                                  .Attr<int64_t>("scale_bytes")
                                  .Attr<int64_t>("page_entries")
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("row_step")
                                  .Attr<int64_t>("num_blocks")
                                  .Attr<int64_t>("warps")
                                  .Attr<int64_t>("rows_in_flight"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
