// The few CUDA runtime calls that page copies need, found in libcudart at run time.
//
// So a plain C++ compiler builds the library, and it loads where there is no CUDA at all. Every CUDA runtime
// in a process shares a device's primary context, the one XLA uses: its streams and pointers work here.
// Source: cuda_runtime_api.h and driver_types.h of CUDA 12 and 13.
#ifndef HISPARSE_FFI_CUDA_CALLS_H_
#define HISPARSE_FFI_CUDA_CALLS_H_

#include <cstddef>
#include <string>

namespace hisparse::cuda {

using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Status = int;  // cudaError_t

constexpr Status kSuccess = 0;
constexpr int kMemcpyDefault = 4;            // cudaMemcpyDefault: the direction follows from the pointers
constexpr unsigned kEventDisableTiming = 2;  // cudaEventDisableTiming
constexpr unsigned kStreamNonBlocking = 1;   // cudaStreamNonBlocking

struct MemLocation {  // cudaMemLocation
  int type;
  int id;
};

struct MemcpyAttributes {  // cudaMemcpyAttributes
  int src_access_order;
  MemLocation src_hint;
  MemLocation dst_hint;
  unsigned flags;
};
constexpr int kSrcAccessOrderStream = 1;  // cudaMemcpySrcAccessOrderStream

struct Runtime {
  const char* (*GetErrorString)(Status);
  Status (*SetDevice)(int);
  Status (*StreamCreateWithFlags)(Stream*, unsigned);
  Status (*StreamSynchronize)(Stream);
  Status (*StreamWaitEvent)(Stream, Event, unsigned);
  Status (*StreamIsCapturing)(Stream, int*);
  Status (*EventCreateWithFlags)(Event*, unsigned);
  Status (*EventRecord)(Event, Stream);
  Status (*MemcpyAsync)(void*, const void*, size_t, int, Stream);
  // Null before CUDA 13, whose signature this is.
  Status (*MemcpyBatchAsync)(void* const*, const void* const*, const size_t*, size_t, MemcpyAttributes*,
                             size_t*, size_t, Stream);
};

// The runtime, or null with `why` set where none can be loaded. Looked for once per process.
const Runtime* LoadRuntime(std::string* why);

}  // namespace hisparse::cuda

#endif  // HISPARSE_FFI_CUDA_CALLS_H_
