// What one handler call copies: pages of one layer, between a slab of blocks and that layer's host pool.
//
//   pool  u8[H, page_bytes]  pinned host memory; row h is the layer's page in host block h
//   slab  u8[N, stride]      the layer's page in block b starts at byte b * stride + offset
//   ids   i32[M], i32[M]     pinned host memory: a handler reads them on the host, when it is called
//
// Block 0 is null in both tiers: a pair with a null side is padding and copies nothing.
#ifndef HISPARSE_FFI_PAGE_COPIES_H_
#define HISPARSE_FFI_PAGE_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace hisparse {

namespace ffi = xla::ffi;

using Bytes = ffi::Buffer<ffi::U8, 2>;
using Ids = ffi::Buffer<ffi::S32, 1>;
using BytesResult = ffi::Result<Bytes>;

struct PageCopy {
  const uint8_t* from;
  uint8_t* to;
};

struct PageCopies {
  std::vector<PageCopy> pages;
  size_t page_bytes;
};

// What a handler works on; `what` (the handler) and `layer` (the pool's name) are for messages.
struct Call {
  std::string_view what;
  std::string_view layer;
  Bytes pool;
  Bytes slab;
};

enum class Direction { kBackup, kRestore };  // slab to pool; pool to slab

// Refuses a result that is not its operand's own buffer: XLA then copied the whole pool or slab.
ffi::Error CheckInPlace(const Call& call, const Bytes& operand, const Bytes& result);

// Checks the result's place, shapes, every id, and that no destination is named twice, before it returns a
// single copy: a call that is refused has copied nothing.
ffi::ErrorOr<PageCopies> PlanCopies(const Call& call, Direction direction, int64_t offset, const Ids& source,
                                    const Ids& destination, const Bytes& result);

// Refusals of a join, in the same words on both platforms.
ffi::Error NothingForked(const Call& call);
ffi::Error SlabMoved(const Call& call);

// Bindings shared by both platforms, which bind their contexts first.
template <typename Binding>
auto BindBackup(Binding binding) {
  return std::move(binding)
      .template Arg<Bytes>()  // pool u8[H, page_bytes]
      .template Arg<Bytes>()  // slab u8[N, stride]
      .template Arg<Ids>()    // source GPU blocks i32[M]
      .template Arg<Ids>()    // destination host blocks i32[M]
      .template Ret<Bytes>()  // pool, aliased
      .template Attr<int64_t>("offset")
      .template Attr<std::string_view>("layer");
}

template <typename Binding>
auto BindJoin(Binding binding) {
  return std::move(binding)
      .template Arg<Bytes>()  // pool u8[H, page_bytes]
      .template Arg<Bytes>()  // slab u8[N, stride], the buffer that the fork read
      .template Ret<Bytes>()  // pool, aliased
      .template Attr<std::string_view>("layer");
}

template <typename Binding>
auto BindRestore(Binding binding) {
  return std::move(binding)
      .template Arg<Bytes>()  // pool u8[H, page_bytes]
      .template Arg<Bytes>()  // slab u8[N, stride]
      .template Arg<Ids>()    // source host blocks i32[M]
      .template Arg<Ids>()    // destination GPU blocks i32[M]
      .template Ret<Bytes>()  // slab, aliased
      .template Attr<int64_t>("offset")
      .template Attr<std::string_view>("layer");
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_PAGE_COPIES_H_
