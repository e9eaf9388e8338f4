// What the two handlers that resolve have in common: operands, results, their checks. Included by .cu files
// only.
#ifndef HISPARSE_FFI_RESOLVE_HANDLER_H_
#define HISPARSE_FFI_RESOLVE_HANDLER_H_

#include <algorithm>
#include <string>
#include <utility>

#include "cuda_launch.h"
#include "resolve_kernel.h"

namespace hisparse {

using Ints1 = ffi::Buffer<ffi::S32, 1>;
using Ints2 = ffi::Buffer<ffi::S32, 2>;
using Ints3 = ffi::Buffer<ffi::S32, 3>;
using Flags = ffi::Buffer<ffi::PRED, 2>;
using Order = ffi::Buffer<ffi::S16, 2>;

// One launch: what the kernel takes, or why it cannot.
struct ResolveCall {
  const char* what;
  cudaStream_t stream;
  Ints3 topk;
  Ints2 num_entries;
  Flags row_valid;
  Ints1 first_new;
  Ints2 resident, host, hot, slot_host;
  Order lru;
  ffi::Result<Ints2> rows, num_valid, host_rows, dest_rows, slots;
  ffi::Result<Ints1> num_misses;
  ffi::Result<Ints2> counts;
  ffi::Result<Ints1> num_homeless;
  ffi::Result<Ints2> new_slot_host;
  ffi::Result<Order> new_lru;
  int64_t page_entries, row_step, num_host_blocks;

  int batch() const { return static_cast<int>(topk.dimensions()[0]); }
  int64_t refs() const { return topk.dimensions()[1] * topk.dimensions()[2]; }

  Operands operands() const {
    return {topk.typed_data(),     num_entries.typed_data(), row_valid.typed_data(), first_new.typed_data(),
            resident.typed_data(), host.typed_data(),        hot.typed_data()};
  }
  Results results() {
    return {rows->typed_data(),      num_valid->typed_data(),    host_rows->typed_data(),
            dest_rows->typed_data(), slots->typed_data(),        num_misses->typed_data(),
            counts->typed_data(),    num_homeless->typed_data(), new_slot_host->typed_data(),
            new_lru->typed_data()};
  }
  Request request() const {  // of what `Prepare` has let pass
    const auto size = [](const auto& buffer, int i) { return static_cast<int>(buffer.dimensions()[i]); };
    return Request::Of(size(topk, 1), size(topk, 2), size(resident, 1), size(hot, 1), size(lru, 1),
                       page_entries, static_cast<int>(row_step), static_cast<int>(num_host_blocks));
  }

  // Refuses what the kernel cannot hold, and has map and LRU order stand where the kernel updates them in
  // place: XLA may give a result that is stored elsewhere at once (a scan's) another buffer.
  ffi::Error Prepare() {
    const int64_t num_slots = lru.dimensions()[1];
    if (refs() > kMaxRefs || num_slots > kMaxSlots || refs() > num_slots) {
      return ffi::Error::InvalidArgument(std::string(what) + ": " + std::to_string(refs()) +
                                         " references and " + std::to_string(num_slots) + " slots; at most " +
                                         std::to_string(kMaxRefs) + " and " + std::to_string(kMaxSlots) +
                                         ", and no fewer slots than references");
    }
    if (page_entries < 1 || hot.dimensions()[1] * page_entries < num_slots) {
      return ffi::Error::InvalidArgument(std::string(what) + ": the hot region is smaller than its slots");
    }
    ffi::Error error = CopyUnlessSame(slot_host, *new_slot_host);
    return error.failure() ? error : CopyUnlessSame(lru, *new_lru);
  }

 private:
  template <typename Buffer>
  ffi::Error CopyUnlessSame(const Buffer& from, Buffer& to) const {
    if (from.untyped_data() == to.untyped_data() || from.element_count() == 0) return ffi::Error::Success();
    return CheckCuda(what, "cudaMemcpyAsync",
                     cudaMemcpyAsync(to.untyped_data(), from.untyped_data(), from.size_bytes(),
                                     cudaMemcpyDeviceToDevice, stream));
  }
};

template <typename Binding>
auto BindResolveOperands(Binding binding) {
  return std::move(binding)
      .template Arg<Ints3>()   // topk i32[B, Q, K]
      .template Arg<Ints2>()   // num_entries i32[B, Q]
      .template Arg<Flags>()   // row_valid bool[B, Q]
      .template Arg<Ints1>()   // first_new i32[B]
      .template Arg<Ints2>()   // resident i32[B, P]
      .template Arg<Ints2>()   // host i32[B, P]
      .template Arg<Ints2>()   // hot i32[B, HP]
      .template Arg<Ints2>()   // slot_host i32[B, S]
      .template Arg<Order>();  // lru i16[B, S]
}

template <typename Binding>
auto BindResolveResults(Binding binding) {
  return std::move(binding)
      .template Ret<Ints2>()  // rows i32[B, R], R = Q * K
      .template Ret<Ints2>()  // num_valid i32[B, Q]
      .template Ret<Ints2>()  // host_rows i32[B, R]
      .template Ret<Ints2>()  // dest_rows i32[B, R]
      .template Ret<Ints2>()  // slots i32[B, R]
      .template Ret<Ints1>()  // num_misses i32[B]
      .template Ret<Ints2>()  // counts i32[B, 5]
      .template Ret<Ints1>()  // num_homeless i32[B]
      .template Ret<Ints2>()  // slot_host, aliased
      .template Ret<Order>()  // lru, aliased
      .template Attr<int64_t>("page_entries")
      .template Attr<int64_t>("row_step")
      .template Attr<int64_t>("num_host_blocks");
}

}  // namespace hisparse

#endif  // HISPARSE_FFI_RESOLVE_HANDLER_H_
