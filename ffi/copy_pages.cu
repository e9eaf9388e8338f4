// Whole pages to the host: by ids on the device inside a loop, or by places that the host knows
// (page_kernel.h).
#include "page_kernel.h"
#include "rows.h"

namespace hisparse {
namespace {

using namespace rows;

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
