// Resolve alone: a block a request, nothing copied. The kernel is resolve_kernel.h.
#include "resolve_handler.h"

namespace hisparse {
namespace {

template <bool kPlain>
__global__ void __launch_bounds__(kResolveThreads, 1)
    ResolveKernel(const __grid_constant__ Operands in, const __grid_constant__ Results out,
                  const __grid_constant__ Request shape) {
  extern __shared__ __align__(16) int shared[];
  NoFetch nothing;
  Resolve<kPlain>(in, out, shape, shared, nothing);
}

ffi::Error ResolveTopk(cudaStream_t stream, int32_t ordinal, Ints3 topk, Ints2 num_entries, Flags row_valid,
                       Ints1 first_new, Ints2 resident, Ints2 host, Ints2 hot, Ints2 slot_host, Order lru,
                       ffi::Result<Ints2> rows, ffi::Result<Ints2> num_valid, ffi::Result<Ints2> host_rows,
                       ffi::Result<Ints2> dest_rows, ffi::Result<Ints2> slots, ffi::Result<Ints1> num_misses,
                       ffi::Result<Ints2> counts, ffi::Result<Ints1> num_homeless,
                       ffi::Result<Ints2> new_slot_host, ffi::Result<Order> new_lru, int64_t page_entries,
                       int64_t row_step, int64_t num_host_blocks) {
  ResolveCall call{"resolve_topk", stream,        topk,      num_entries,  row_valid,  first_new,
                   resident,       host,          hot,       slot_host,    lru,        rows,
                   num_valid,      host_rows,     dest_rows, slots,        num_misses, counts,
                   num_homeless,   new_slot_host, new_lru,   page_entries, row_step,   num_host_blocks};
  if (call.batch() == 0) return ffi::Error::Success();
  if (ffi::Error error = call.Prepare(); error.failure()) return error;
  const Request shape = call.request();
  return Launch(call.what, stream, ordinal, call.batch(), kResolveThreads, 1, shape.shared_bytes(),
                shape.is_plain() ? &ResolveKernel<true> : &ResolveKernel<false>, call.operands(),
                call.results(), shape);
}

auto BindResolveTopk() {
  return BindResolveResults(BindResolveOperands(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>()));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_resolve_topk_cuda, ResolveTopk, BindResolveTopk(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
