// Resolve and the copy of what it misses, in one kernel: up to eight blocks a request, as the GPU has room.
//
// Each block of a request resolves it for itself, which costs nothing where a multiprocessor would idle, and
// copies a share of its rows, so that one request with many misses is not served by one block. The blocks are
// a cluster: its first writes the results, map and LRU order in place, once the others have read them.
//
// A warp copies some rows at a time, with plain loads: these drew 44 GB/s over the link where copies to
// shared memory by the copy engine drew 39, and by `cp.async` 23. It asks for its first rows as soon as their
// slots are known, and has the results of the resolve written while they cross the link. The resolve is
// resolve_kernel.h, its results are those of resolve_topk.cu.
#include <cooperative_groups.h>

#include "resolve_handler.h"

namespace hisparse {
namespace {

using Bytes = ffi::Buffer<ffi::U8, 2>;

namespace cg = cooperative_groups;

constexpr int kMostBlocks = 8;    // of a request
constexpr int kRowsInFlight = 2;  // of a warp
constexpr int kWordsEach = 2;     // 16-byte words of a row a lane copies

struct Swap {
  const uint8_t* pool;
  uint8_t* slab;
  int64_t page_bytes, stride, offset;
  int value_bytes, scale_bytes;  // of a row: at most 1,024, a multiple of 16; 8 or none
  int num_slab_blocks;
  int blocks;  // of a request: a power of two

  // Warps of a request take its misses in turn, neighbours on different blocks.
  __device__ int FirstMiss() const { return threadIdx.x / 32 * blocks + Rank(); }
  __device__ int NumWarps() const { return kResolveWarps * blocks; }
  __device__ int Rank() const { return blockIdx.x & (blocks - 1); }
};

template <bool kPlain>
struct RowFetch {
  const Swap& swap;
  const Divisor page_entries;
  int* host_rows;  // by miss
  uint4 words[kRowsInFlight][kWordsEach];
  uint2 scales[kRowsInFlight];
  uint8_t* targets[kRowsInFlight];  // values; null where there is no row
  const uint16_t* slot_of;
  const int* hot;
  int num_misses = 0;
  cg::cluster_group::arrival_token arrived;

  __device__ int Request() const { return blockIdx.x / swap.blocks; }
  __device__ bool Writes() const { return swap.Rank() == 0; }
  __device__ void Note(int miss, int host_row) { host_rows[miss] = host_row; }

  __device__ void Load(int first) {
    const int lane = threadIdx.x % 32;
    const uint8_t *from[kRowsInFlight], *scales_from[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int miss = first + i * swap.NumWarps();
      targets[i] = nullptr;
      if (miss >= num_misses) continue;
      const int host_row = host_rows[miss], host_page = page_entries.Quotient<kPlain>(host_row);
      const int at = host_row - host_page * page_entries.value;
      from[i] = swap.pool + host_page * swap.page_bytes + at * swap.value_bytes;
      scales_from[i] = swap.pool + host_page * swap.page_bytes + page_entries.value * swap.value_bytes +
                       at * swap.scale_bytes;
      const int slot = slot_of[miss], hot_page = page_entries.Quotient<kPlain>(slot), block = hot[hot_page];
      if (block >= swap.num_slab_blocks) continue;
      targets[i] = swap.slab + block * swap.stride + swap.offset +
                   (slot - hot_page * page_entries.value) * swap.value_bytes;
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (targets[i] == nullptr) continue;
#pragma unroll
      for (int word = 0; word < kWordsEach; ++word) {
        if ((word * 32 + lane) * 16 < swap.value_bytes) {
          words[i][word] = __ldcs(reinterpret_cast<const uint4*>(from[i]) + word * 32 + lane);
        }
      }
      if (lane == 31 && swap.scale_bytes > 0)
        scales[i] = __ldcs(reinterpret_cast<const uint2*>(scales_from[i]));
    }
  }

  __device__ void Store(int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (targets[i] == nullptr) continue;
#pragma unroll
      for (int word = 0; word < kWordsEach; ++word) {
        if ((word * 32 + lane) * 16 < swap.value_bytes) {
          reinterpret_cast<uint4*>(targets[i])[word * 32 + lane] = words[i][word];
        }
      }
      if (lane == 31 && swap.scale_bytes > 0) {
        const int slot = slot_of[first + i * swap.NumWarps()];
        const int at = slot - page_entries.Quotient<kPlain>(slot) * page_entries.value;
        uint8_t* page = targets[i] - at * swap.value_bytes;
        reinterpret_cast<uint2*>(page + page_entries.value * swap.value_bytes)[at] = scales[i];
      }
    }
  }

  __device__ void Start(int count, const uint16_t* slots, const int* hot_blocks) {
    num_misses = count;
    slot_of = slots;
    hot = hot_blocks;
    if (swap.blocks > 1) arrived = cg::this_cluster().barrier_arrive();
    Load(swap.FirstMiss());
  }

  __device__ void AwaitReaders() {
    if (swap.blocks > 1) cg::this_cluster().barrier_wait(std::move(arrived));
  }

  __device__ void Finish() {
    for (int first = swap.FirstMiss(); first < num_misses;) {
      Store(first);
      first += kRowsInFlight * swap.NumWarps();
      if (first < num_misses) Load(first);
    }
  }
};

template <bool kPlain>
__global__ void __launch_bounds__(kResolveThreads, 1)
    ResolveAndGatherKernel(const __grid_constant__ Operands in, const __grid_constant__ Results out,
                           const __grid_constant__ Request shape, const __grid_constant__ Swap swap) {
  extern __shared__ __align__(16) int shared[];
  RowFetch<kPlain> fetch{swap, shape.page_entries, shared};
  Resolve<kPlain>(in, out, shape, shared + Request::Padded(shape.refs), fetch);
  fetch.Finish();
}

ffi::Error ResolveAndGather(cudaStream_t stream, int32_t ordinal, Bytes pool, Bytes slab, Ints3 topk,
                            Ints2 num_entries, Flags row_valid, Ints1 first_new, Ints2 resident, Ints2 host,
                            Ints2 hot, Ints2 slot_host, Order lru, ffi::Result<Bytes> new_slab,
                            ffi::Result<Ints2> rows, ffi::Result<Ints2> num_valid,
                            ffi::Result<Ints2> host_rows, ffi::Result<Ints2> dest_rows,
                            ffi::Result<Ints2> slots, ffi::Result<Ints1> num_misses,
                            ffi::Result<Ints2> counts, ffi::Result<Ints1> num_homeless,
                            ffi::Result<Ints2> new_slot_host, ffi::Result<Order> new_lru,
                            int64_t page_entries, int64_t row_step, int64_t num_host_blocks,
                            int64_t value_bytes, int64_t scale_bytes, int64_t offset) {
  ResolveCall call{"resolve_and_gather",
                   stream,
                   topk,
                   num_entries,
                   row_valid,
                   first_new,
                   resident,
                   host,
                   hot,
                   slot_host,
                   lru,
                   rows,
                   num_valid,
                   host_rows,
                   dest_rows,
                   slots,
                   num_misses,
                   counts,
                   num_homeless,
                   new_slot_host,
                   new_lru,
                   page_entries,
                   row_step,
                   num_host_blocks};
  const auto refuse = [&](const std::string& why) {
    return ffi::Error::InvalidArgument(std::string(call.what) + ": " + why);
  };
  const int64_t page_bytes = pool.dimensions()[1], stride = slab.dimensions()[1];
  if (new_slab->untyped_data() != slab.untyped_data()) return refuse("alias the slab with its operand.");
  if (num_host_blocks > pool.dimensions()[0]) {
    return refuse(std::to_string(num_host_blocks) + " host blocks, the pool has " +
                  std::to_string(pool.dimensions()[0]) + ".");
  }
  const int64_t values = page_entries * value_bytes;
  if (value_bytes < 16 || value_bytes > 16 * 32 * kWordsEach || (scale_bytes != 0 && scale_bytes != 8) ||
      offset < 0 || values + page_entries * scale_bytes > page_bytes || offset + page_bytes > stride) {
    return refuse("rows of " + std::to_string(value_bytes) + " + " + std::to_string(scale_bytes) +
                  " bytes do not fit the page of " + std::to_string(page_bytes) + " bytes.");
  }
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  if ((address(pool.untyped_data()) | address(slab.untyped_data()) | value_bytes | page_bytes | stride |
       offset) %
      16) {
    return refuse("pages and rows must stand 16-byte aligned.");
  }
  if (call.batch() == 0) return ffi::Error::Success();
  if (ffi::Error error = call.Prepare(); error.failure()) return error;
  const Request shape = call.request();
  int num_processors = 0, blocks = 1;
  ffi::Error error =
      CheckCuda(call.what, "cudaDeviceGetAttribute",
                cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, ordinal));
  if (error.failure()) return error;
  while (blocks < kMostBlocks && 2 * blocks * call.batch() <= num_processors) blocks *= 2;
  const Swap swap = {pool.typed_data(),
                     new_slab->typed_data(),
                     page_bytes,
                     stride,
                     offset,
                     static_cast<int>(value_bytes),
                     static_cast<int>(scale_bytes),
                     static_cast<int>(slab.dimensions()[0]),
                     blocks};
  const size_t shared_bytes = shape.shared_bytes() + sizeof(int) * Request::Padded(shape.refs);
  return Launch(call.what, stream, ordinal, call.batch() * blocks, kResolveThreads, blocks, shared_bytes,
                shape.is_plain() ? &ResolveAndGatherKernel<true> : &ResolveAndGatherKernel<false>,
                call.operands(), call.results(), shape, swap);
}

auto BindResolveAndGather() {
  auto operands = BindResolveOperands(ffi::Ffi::Bind()
                                          .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                          .Ctx<ffi::DeviceOrdinal>()
                                          .Arg<Bytes>()        // pool u8[H, page_bytes]
                                          .Arg<Bytes>());      // slab u8[N, stride]
  return BindResolveResults(std::move(operands).Ret<Bytes>())  // slab, aliased
      .Attr<int64_t>("value_bytes")
      .Attr<int64_t>("scale_bytes")
      .Attr<int64_t>("offset");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_resolve_and_gather_cuda, ResolveAndGather, BindResolveAndGather(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
