// Rows and pages between the slab and a layer's pinned host pool, moved by the GPU's own loads and stores.
//
// Ids are read on the device, so every call may stand in a loop and be captured into a CUDA graph. One warp
// moves one row, or one piece of a page, in words of 16 bytes where every address allows it; addresses are
// 64-bit. An id list is mostly padding: each warp takes every `warps`-th id, or, where the wanted ids of each
// list are counted, its part of those alone. No request is served by one block.
// The references are in pallas_kernels/ref.py, under the same names.
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "page_kernel.h"
#include "xla/ffi/api/ffi.h"

namespace hisparse {
namespace {

namespace ffi = xla::ffi;

using Bytes = ffi::Buffer<ffi::U8, 2>;
using Ids = ffi::Buffer<ffi::S32, 1>;

constexpr int kLanes = 32;
constexpr int kWarps = 8;  // of one block
constexpr int kThreads = kLanes * kWarps;
constexpr int kMostThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffffu;

constexpr int kWordsInFlight = 2;  // words of each of them a lane loads at a time
constexpr int kMaxLists = 1024;    // lists of a gather whose lengths a block holds
constexpr int kPieceWords = 4;     // words a lane moves at a time of a page piece, or of a row to store

// Words a row's values and scales, or a page, can be moved in: every address and size is a multiple of them.
int64_t WordBytes(uint64_t addresses) {
  for (int64_t bytes : {16, 8, 4}) {
    if (addresses % bytes == 0) return bytes;
  }
  return 1;
}

uint64_t Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

__device__ int64_t WarpNumber() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
__device__ int64_t NumWarps() { return int64_t{gridDim.x} * kWarps; }
__device__ int Lane() { return threadIdx.x % kLanes; }

template <typename T>
__device__ T* FromLane(T* pointer, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

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

// A page's place for rows: values of all rows first, then all scales.
struct RowShape {
  int64_t value_bytes;
  int64_t scale_bytes;
  int64_t page_entries;

  __host__ __device__ int64_t Values(int64_t slot) const { return value_bytes * slot; }
  __host__ __device__ int64_t Scales(int64_t slot) const {
    return value_bytes * page_entries + scale_bytes * slot;
  }
  bool Fits(int64_t bytes) const {
    return value_bytes > 0 && scale_bytes >= 0 && page_entries > 0 &&
           page_entries * (value_bytes + scale_bytes) <= bytes;
  }
};

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

struct Store {
  const uint8_t* rows;
  const int32_t* host_rows;
  uint8_t* pool;
  int64_t count;
  int64_t row_bytes;
  RowShape row;
  int64_t page_bytes;
  int64_t num_host_rows;
};

// Packed rows stand 8-byte aligned at best (584 bytes each), so `Word` is at most that here.
template <typename Word>
__global__ void __launch_bounds__(kThreads) StoreKernel(const Store s) {
  const int value_words = static_cast<int>(s.row.value_bytes / sizeof(Word));
  const int words = static_cast<int>(s.row_bytes / sizeof(Word));
  for (int64_t item = WarpNumber(); item < s.count; item += NumWarps()) {
    const int32_t host_row = s.host_rows[item];
    if (host_row < 0 || host_row >= s.num_host_rows) continue;
    const int32_t entries = static_cast<int32_t>(s.row.page_entries);
    uint8_t* page = s.pool + int64_t{host_row / entries} * s.page_bytes;
    Word* values = reinterpret_cast<Word*>(page + s.row.Values(host_row % entries));
    Word* scales = reinterpret_cast<Word*>(page + s.row.Scales(host_row % entries));
    const Word* from = reinterpret_cast<const Word*>(s.rows + item * s.row_bytes);
    for (int first = 0; first < words; first += kLanes * kPieceWords) {
      Word held[kPieceWords];
#pragma unroll
      for (int i = 0; i < kPieceWords; ++i) {
        const int word = first + i * kLanes + Lane();
        if (word < words) held[i] = from[word];
      }
#pragma unroll
      for (int i = 0; i < kPieceWords; ++i) {
        const int word = first + i * kLanes + Lane();
        if (word < words) (word < value_words ? values[word] : scales[word - value_words]) = held[i];
      }
    }
  }
}

// One piece of a page: kPieceWords words a lane, all loads before all stores.
template <typename Word>
__device__ void CopyPiece(const uint8_t* from, uint8_t* to, int64_t page_bytes, int64_t piece) {
  const int64_t words = page_bytes / sizeof(Word), first = piece * kLanes * kPieceWords + Lane();
  Word held[kPieceWords];
#pragma unroll
  for (int i = 0; i < kPieceWords; ++i) {
    const int64_t word = first + i * kLanes;
    if (word < words) held[i] = __ldcs(reinterpret_cast<const Word*>(from) + word);
  }
#pragma unroll
  for (int i = 0; i < kPieceWords; ++i) {
    const int64_t word = first + i * kLanes;
    if (word < words) reinterpret_cast<Word*>(to)[word] = held[i];
  }
}

int64_t NumPieces(int64_t page_bytes, int64_t word_bytes) {
  const int64_t piece = word_bytes * kLanes * kPieceWords;
  return (page_bytes + piece - 1) / piece;
}

struct Copy {
  const uint8_t* slab;
  const int32_t* slab_blocks;
  const int32_t* host_blocks;
  uint8_t* pool;
  int64_t count;
  int64_t num_pieces;  // of one page
  int64_t page_bytes;
  int64_t stride;
  int64_t offset;
  int64_t num_slab_blocks;
  int64_t num_host_blocks;
};

template <typename Word>
__global__ void __launch_bounds__(kThreads) CopyKernel(const Copy c) {
  for (int64_t begin = 0; begin < c.count * c.num_pieces; begin += kLanes * NumWarps()) {
    const int64_t item = begin + Lane() * NumWarps() + WarpNumber();
    const uint8_t* from = nullptr;
    uint8_t* to = nullptr;
    if (item < c.count * c.num_pieces) {
      const int32_t slab_block = c.slab_blocks[item / c.num_pieces];
      const int32_t host_block = c.host_blocks[item / c.num_pieces];
      const bool in_slab = slab_block > 0 && slab_block < c.num_slab_blocks;
      if (in_slab && host_block > 0 && host_block < c.num_host_blocks) {
        from = c.slab + slab_block * c.stride + c.offset;
        to = c.pool + host_block * c.page_bytes;
      }
    }
    const auto piece = static_cast<unsigned>(item % c.num_pieces);
    for (unsigned todo = __ballot_sync(kAllLanes, to != nullptr); todo != 0; todo &= todo - 1) {
      const int lane = __ffs(todo) - 1;
      CopyPiece<Word>(FromLane(from, lane), FromLane(to, lane), c.page_bytes,
                      __shfl_sync(kAllLanes, piece, lane));
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    PlacesKernel(const __grid_constant__ PagePlaces places, int64_t page_bytes, int64_t num_pieces) {
  for (int64_t item = WarpNumber(); item < places.count * num_pieces; item += NumWarps()) {
    const int64_t page = item / num_pieces;
    CopyPiece<Word>(places.from[page], places.to[page], page_bytes, item % num_pieces);
  }
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

ffi::Error Report(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(status));
}

ffi::Error Refuse(const char* what, const std::string& why) {
  return ffi::Error::InvalidArgument(std::string(what) + ": " + why);
}

// Never more blocks than there is work for, and at least one.
int64_t NumBlocks(int64_t most, int64_t items) {
  const int64_t needed = (items + kWarps - 1) / kWarps;
  return needed < most ? (needed < 1 ? 1 : needed) : (most < 1 ? 1 : most);
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

ffi::Error StoreEntry(cudaStream_t stream, int32_t device, Bytes pool, Bytes rows, Ids host_rows,
                      ffi::Result<Bytes> result, int64_t value_bytes, int64_t scale_bytes,
                      int64_t page_entries) {
  const char* what = "store_entry";
  const int64_t page_bytes = pool.dimensions()[1], row_bytes = rows.dimensions()[1];
  const RowShape row{value_bytes, scale_bytes, page_entries};
  if (result->untyped_data() != pool.untyped_data()) return Refuse(what, "alias the pool with its operand.");
  if (!row.Fits(page_bytes) || row_bytes != value_bytes + scale_bytes ||
      static_cast<int64_t>(host_rows.element_count()) != rows.dimensions()[0]) {
    return Refuse(what, "rows of " + std::to_string(row_bytes) + " bytes, ids or pages do not fit together.");
  }
  Store s{rows.typed_data(),
          host_rows.typed_data(),
          result->typed_data(),
          rows.dimensions()[0],
          row_bytes,
          row,
          page_bytes,
          pool.dimensions()[0] * page_entries};
  const int64_t word = WordBytes(Address(s.rows) | Address(s.pool) | page_bytes | value_bytes | scale_bytes);
  if (cudaError_t status = cudaSetDevice(device); status != cudaSuccess) return Report(what, status);
  auto kernel = word == 16  ? StoreKernel<uint4>
                : word == 8 ? StoreKernel<uint2>
                : word == 4 ? StoreKernel<uint32_t>
                            : StoreKernel<uint8_t>;
  return Report(what, Launch(kernel, NumBlocks(1 << 16, s.count), kThreads, stream, s));
}

ffi::Error CopyPages(cudaStream_t stream, int32_t device, Bytes pool, Bytes slab, Ids slab_blocks,
                     Ids host_blocks, ffi::Result<Bytes> result, int64_t offset, int64_t num_blocks) {
  const char* what = "copy_pages";
  const int64_t page_bytes = pool.dimensions()[1], stride = slab.dimensions()[1];
  if (result->untyped_data() != pool.untyped_data()) return Refuse(what, "alias the pool with its operand.");
  if (offset < 0 || offset > stride - page_bytes) {
    return Refuse(what, "a page of " + std::to_string(page_bytes) + " bytes at offset " +
                            std::to_string(offset) + " leaves the block of " + std::to_string(stride) +
                            " bytes.");
  }
  if (slab_blocks.element_count() != host_blocks.element_count()) {
    return Refuse(what, std::to_string(slab_blocks.element_count()) + " slab blocks, " +
                            std::to_string(host_blocks.element_count()) + " host blocks.");
  }
  Copy c{slab.typed_data(),
         slab_blocks.typed_data(),
         host_blocks.typed_data(),
         result->typed_data(),
         static_cast<int64_t>(slab_blocks.element_count()),
         0,
         page_bytes,
         stride,
         offset,
         slab.dimensions()[0],
         pool.dimensions()[0]};
  const int64_t word = WordBytes(Address(c.slab) | Address(c.pool) | page_bytes | stride | offset);
  c.num_pieces = NumPieces(page_bytes, word < 4 ? 1 : word == 16 ? 16 : 4);
  if (cudaError_t status = cudaSetDevice(device); status != cudaSuccess) return Report(what, status);
  auto kernel = word == 16 ? CopyKernel<uint4> : word == 1 ? CopyKernel<uint8_t> : CopyKernel<uint32_t>;
  return Report(what, Launch(kernel, NumBlocks(num_blocks, c.count * c.num_pieces), kThreads, stream, c));
}

auto BindDevice() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

}  // namespace

int LaunchPageCopies(void* stream, const PagePlaces& places, int64_t page_bytes, int64_t num_blocks) {
  uint64_t addresses = page_bytes;
  for (int64_t page = 0; page < places.count; ++page) {
    addresses |= Address(places.from[page]) | Address(places.to[page]);
  }
  const int64_t word = WordBytes(addresses);
  auto kernel = word == 16 ? PlacesKernel<uint4> : word == 1 ? PlacesKernel<uint8_t> : PlacesKernel<uint32_t>;
  const int64_t pieces = NumPieces(page_bytes, word == 16 ? 16 : word == 1 ? 1 : 4);
  return Launch(kernel, NumBlocks(num_blocks, places.count * pieces), kThreads,
                static_cast<cudaStream_t>(stream), places, page_bytes, pieces);
}

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

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_store_entry_cuda, StoreEntry,
                              BindDevice()
                                  .Arg<Bytes>()  // pool u8[H, page_bytes]
                                  .Arg<Bytes>()  // packed rows u8[M, row_bytes]
                                  .Arg<Ids>()    // host rows i32[M]
                                  .Ret<Bytes>()  // pool, aliased
                                  .Attr<int64_t>("value_bytes")
                                  .Attr<int64_t>("scale_bytes")
                                  .Attr<int64_t>("page_entries"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_copy_pages_cuda, CopyPages,
                              BindDevice()
                                  .Arg<Bytes>()  // pool u8[H, page_bytes]
                                  .Arg<Bytes>()  // slab u8[N, stride]
                                  .Arg<Ids>()    // slab blocks i32[M]
                                  .Arg<Ids>()    // host blocks i32[M]
                                  .Ret<Bytes>()  // pool, aliased
                                  .Attr<int64_t>("offset")
                                  .Attr<int64_t>("num_blocks"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
