// Packed rows to host pages: the write-through of one layer. A block of one warp stores one row, so that few
// rows spread over the GPU; the row is read beside its id.
#include "rows.h"

namespace hisparse {
namespace {

using namespace rows;

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
__global__ void __launch_bounds__(kLanes) StoreKernel(const Store s) {
  const int value_words = static_cast<int>(s.row.value_bytes / sizeof(Word));
  const int words = static_cast<int>(s.row_bytes / sizeof(Word));
  const int64_t item = blockIdx.x;
  const Word* from = reinterpret_cast<const Word*>(s.rows + item * s.row_bytes);
  Word held[kPieceWords];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {
      const int word = first + i * kLanes + Lane();
      if (word < words) held[i] = from[word];
    }
  };
  load(0);  // beside the id
  const int32_t host_row = s.host_rows[item];
  if (host_row < 0 || host_row >= s.num_host_rows) return;
  const int32_t entries = static_cast<int32_t>(s.row.page_entries);
  uint8_t* page = s.pool + int64_t{host_row / entries} * s.page_bytes;
  Word* values = reinterpret_cast<Word*>(page + s.row.Values(host_row % entries));
  Word* scales = reinterpret_cast<Word*>(page + s.row.Scales(host_row % entries));
  for (int first = 0; first < words; first += kLanes * kPieceWords) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kPieceWords; ++i) {
      const int word = first + i * kLanes + Lane();
      if (word < words) (word < value_words ? values[word] : scales[word - value_words]) = held[i];
    }
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
  if (s.count == 0) return ffi::Error::Success();
  const int64_t word = WordBytes(Address(s.rows) | Address(s.pool) | page_bytes | value_bytes | scale_bytes);
  if (cudaError_t status = cudaSetDevice(device); status != cudaSuccess) return Report(what, status);
  auto kernel = word == 16  ? StoreKernel<uint4>
                : word == 8 ? StoreKernel<uint2>
                : word == 4 ? StoreKernel<uint32_t>
                            : StoreKernel<uint8_t>;
  return Report(what, Launch(kernel, s.count, kLanes, stream, s));
}

}  // namespace

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

}  // namespace hisparse
