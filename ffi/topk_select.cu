// The k best entries of each row of scores, as ascending entry numbers. Reference: pallas_kernels/ref.py.
// Rows that one block holds go to topk_whole.h, longer ones, or those that a cluster shares, to topk_parts.h.
#include <climits>

#include "cuda_launch.h"
#include "topk_parts.h"
#include "topk_whole.h"

namespace hisparse {
namespace {

struct Arguments {
  cudaStream_t stream;
  int ordinal;
  const void* scores;
  const int32_t* lengths;
  int32_t* selected;
  int num_rows, size, k, num_ctas;
};

constexpr int kMaxCtas = 8;

template <typename Score, int kQuads>
ffi::Error LaunchParts(Arguments a) {
  const size_t bits_bytes = BitsBytes(a.size);
  int list_size = ListSize(a.k, a.num_ctas, bits_bytes);
  if (list_size == 0) a.num_ctas = 1;
  const size_t shared_bytes = bits_bytes + kItemBytes * list_size * a.num_ctas;
  return Launch("topk_select", a.stream, a.ordinal, a.num_rows * a.num_ctas, kThreads, a.num_ctas,
                shared_bytes, &TopkSelectParts<Score, kQuads>, static_cast<const Score*>(a.scores), a.lengths,
                a.selected, a.size, a.k, list_size);
}

template <typename Score, int kQuads>
ffi::Error LaunchWhole(const Arguments& a) {
  return Launch("topk_select", a.stream, a.ordinal, a.num_rows, kThreads, 1, 0,
                &TopkSelectWhole<Score, kQuads>, static_cast<const Score*>(a.scores), a.lengths, a.selected,
                a.size, a.k);
}

template <typename Score>
ffi::Error LaunchTopkSelectOf(const Arguments& a) {
  if (a.num_ctas == 1 && a.size <= 4 * kThreads) return LaunchWhole<Score, 1>(a);
  if (a.num_ctas == 1 && a.size <= 8 * kThreads) return LaunchWhole<Score, 2>(a);
  const int span = (a.size + a.num_ctas - 1) / a.num_ctas;
  return span <= 8 * kThreads    ? LaunchParts<Score, 2>(a)
         : span <= 16 * kThreads ? LaunchParts<Score, 4>(a)
                                 : LaunchParts<Score, 8>(a);
}

ffi::Error TopkSelect(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer scores,
                      ffi::Buffer<ffi::S32, 1> lengths, ffi::ResultBuffer<ffi::S32, 2> selected,
                      int64_t ctas_per_row) {
  if (scores.dimensions().size() != 2 ||
      scores.dimensions()[0] != static_cast<int64_t>(lengths.element_count()) ||
      selected->dimensions()[0] != scores.dimensions()[0]) {
    return ffi::Error::InvalidArgument(
        "topk_select: scores are [rows, N], lengths [rows], selected [rows, k]");
  }
  const int64_t num_rows = scores.dimensions()[0], size = scores.dimensions()[1],
                k = selected->dimensions()[1];
  if (ctas_per_row < 1 || ctas_per_row > kMaxCtas) {
    return ffi::Error::InvalidArgument("topk_select: ctas_per_row=" + std::to_string(ctas_per_row) +
                                       " is outside 1.." + std::to_string(kMaxCtas));
  }
  constexpr int64_t kMaxSize = 512 * 1024;  // two bits a candidate in shared memory
  if (size > kMaxSize || num_rows * ctas_per_row > INT_MAX) {
    return ffi::Error::InvalidArgument("topk_select: [" + std::to_string(num_rows) + ", " +
                                       std::to_string(size) + "] is too large; at most " +
                                       std::to_string(kMaxSize) + " candidates a row");
  }
  if (num_rows == 0 || k == 0) return ffi::Error::Success();
  const Arguments arguments = {stream,
                               ordinal,
                               scores.untyped_data(),
                               lengths.typed_data(),
                               selected->typed_data(),
                               static_cast<int>(num_rows),
                               static_cast<int>(size),
                               static_cast<int>(k),
                               static_cast<int>(ctas_per_row)};
  switch (scores.element_type()) {
    case ffi::F32:
      return LaunchTopkSelectOf<float>(arguments);
    case ffi::BF16:
      return LaunchTopkSelectOf<__nv_bfloat16>(arguments);
    default:
      return ffi::Error::InvalidArgument("topk_select: scores must be f32 or bf16");
  }
}

auto BindTopkSelect() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<ffi::AnyBuffer>()            // scores f32 or bf16 [rows, N]
      .Arg<ffi::Buffer<ffi::S32, 1>>()  // lengths i32[rows]
      .Ret<ffi::Buffer<ffi::S32, 2>>()  // selected i32[rows, k]
      .Attr<int64_t>("ctas_per_row");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_topk_select_cuda, TopkSelect, BindTopkSelect(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace hisparse
