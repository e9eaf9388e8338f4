// What Hopper's warpgroups, of four warps each, need assembly for: products of matrices in shared memory,
// which run beside the instructions that follow. Compiled for sm_90a.
#ifndef HISPARSE_FFI_CUDA_WARPGROUPS_H_
#define HISPARSE_FFI_CUDA_WARPGROUPS_H_

#include "cuda_block.h"
#include "cuda_tiles.h"

namespace hisparse {

// Matrices for products stand in shared memory in blocks of 64 columns: a row's 64 numbers of 16 bits are 128
// bytes, eight words of 16, and row r has word w where word w ^ (r % 8) would be. Blocks begin at multiples
// of 1,024 bytes.
constexpr int kBlockColumns = 64, kBlockWords = 8;

// How a product finds one; `+` moves it by as many words of 16 bytes.
struct Matrix {
  uint32_t low, high;

  __device__ __forceinline__ Matrix operator+(int words) const { return {low + words, high}; }
};

// The same for all threads of a warp, and known to be: what depends on it needs no registers of their own.
__device__ __forceinline__ uint32_t Uniform(uint32_t value) { return __shfl_sync(kAllLanes, value, 0); }

// The number of a word of this block's memory; the upper bits of an address name the block of a cluster.
__device__ __forceinline__ uint32_t WordOf(const uint4* shared) { return (AddressOf(shared) & 0x3ffff) >> 4; }

// Its rows, from a block's first one on: 16 numbers, by default the first, of as many as a product takes.
__device__ __forceinline__ Matrix RowsOf(const uint4* block) {
  return {Uniform(WordOf(block) | 1 << 16), 1024 >> 4 | 1 << 30};
}

// Its columns, 64 of a block and those of the blocks that follow it, of `rows` rows each.
__device__ __forceinline__ Matrix ColumnsOf(const uint4* block, int rows) {
  return {Uniform(WordOf(block) | static_cast<uint32_t>(rows * kBlockWords) << 16), 1024 >> 4 | 1 << 30};
}

// Products of a warpgroup are in flight from `OpenProducts` to `WaitForProducts`: until then nobody touches
// their sums and matrices. What threads wrote to the matrices must have been published before a barrier.
__device__ __forceinline__ void OpenProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Shows what this thread wrote to shared memory to products that begin after the next barrier.
__device__ __forceinline__ void Publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define HISPARSE_FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define HISPARSE_SIXTEEN(x, i) \
  HISPARSE_FOUR(x, i), HISPARSE_FOUR(x, i + 4), HISPARSE_FOUR(x, i + 8), HISPARSE_FOUR(x, i + 12)

// sums = a b^T, or += it: 64 rows and 64 rows of 16 numbers. Lane l of warp w has of tile t of 8 columns the
// numbers 4 t ... 4 t + 3: two of row 16 w + l / 4 from column 2 (l % 4) on, and two of the eighth row below.
__device__ __forceinline__ void MultiplyRows(float (&sums)[32], Matrix a, Matrix b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      ".reg .b64 a, b;\n"
      "setp.ne.b32 adds, %36, 0;\n"
      "mov.b64 a, {%32, %33};\n"
      "mov.b64 b, {%34, %35};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, a, b, adds, 1, 1, 0, 0;\n"
      "}"
      : HISPARSE_SIXTEEN(sums, 0), HISPARSE_SIXTEEN(sums, 16)
      : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(adds ? 1 : 0));
}

// sums += a b: 64 rows of 16 numbers, 16 rows of 256. Lanes as above.
__device__ __forceinline__ void MultiplyColumns(float (&sums)[128], Matrix a, Matrix b) {
  asm volatile(
      "{\n"
      ".reg .b64 a, b;\n"
      "mov.b64 a, {%128, %129};\n"
      "mov.b64 b, {%130, %131};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, a, b, 1, 1, 1, 0, 1;\n"
      "}"
      : HISPARSE_SIXTEEN(sums, 0), HISPARSE_SIXTEEN(sums, 16), HISPARSE_SIXTEEN(sums, 32),
        HISPARSE_SIXTEEN(sums, 48), HISPARSE_SIXTEEN(sums, 64), HISPARSE_SIXTEEN(sums, 80),
        HISPARSE_SIXTEEN(sums, 96), HISPARSE_SIXTEEN(sums, 112)
      : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high));
}

#undef HISPARSE_SIXTEEN
#undef HISPARSE_FOUR

}  // namespace hisparse

#endif  // HISPARSE_FFI_CUDA_WARPGROUPS_H_
