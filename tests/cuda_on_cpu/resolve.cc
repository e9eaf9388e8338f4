// The kernel of resolve for a caller from Python: ffi/resolve_topk.cu without a GPU.
#include "resolve_kernel.h"

using namespace hisparse;

// `sizes`: B, Q, K, P, HP, S, entries of a page, row step, host blocks, seed. `slot_host` and `lru` are
// changed in place.
extern "C" void resolve(const void* topk, const void* num_entries, const void* row_valid,
                        const void* first_new, const void* resident, const void* host, const void* hot,
                        void* rows, void* num_valid, void* host_rows, void* dest_rows, void* slots,
                        void* num_misses, void* counts, void* num_homeless, void* slot_host, void* lru,
                        const int64_t* sizes) {
  const auto size = [&](int i) { return static_cast<int>(sizes[i]); };
  const auto in = [](const void* ints) { return static_cast<const int32_t*>(ints); };
  const auto out = [](void* ints) { return static_cast<int32_t*>(ints); };
  const Operands operands = {in(topk),      in(num_entries), static_cast<const bool*>(row_valid),
                             in(first_new), in(resident),    in(host),
                             in(hot)};
  const Results results = {
      out(rows),       out(num_valid), out(host_rows),    out(dest_rows), out(slots),
      out(num_misses), out(counts),    out(num_homeless), out(slot_host), static_cast<int16_t*>(lru)};
  const Request shape = Request::Of(size(1), size(2), size(3), size(4), size(5), sizes[6], size(7), size(8));
  emulator::grid = {static_cast<unsigned>(size(0)), 1, 1};
  for (unsigned request = 0; request < emulator::grid.x; ++request) {
    const auto kernel = [&] {
      NoFetch nothing;
      int* const shared = reinterpret_cast<int*>(SharedMemory());
      if (shape.is_plain()) {
        Resolve<true>(operands, results, shape, shared, nothing);
      } else {
        Resolve<false>(operands, results, shape, shared, nothing);
      }
    };
    emulator::RunCluster(1, {request, 0, 0}, kResolveThreads, shape.shared_bytes(),
                         static_cast<unsigned>(size(9)) + request, kernel);
  }
}
