#include "cuda_calls.h"

#include <dlfcn.h>

namespace hisparse::cuda {
namespace {

struct Loaded {
  Runtime runtime{};
  bool usable = false;
  std::string why;
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// A name without a folder also finds a library that JAX has loaded already, from a pip wheel or from the
// system.
void* OpenLibrary(bool* cuda13) {
  *cuda13 = true;
  for (const char* name : {"libcudart.so.13", "/usr/local/cuda/lib64/libcudart.so.13"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  *cuda13 = false;
  for (const char* name : {"libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so.12"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

Loaded Load() {
  Loaded loaded;
  bool cuda13 = false;
  void* library = OpenLibrary(&cuda13);
  if (library == nullptr) {
    loaded.why =
        "no libcudart.so.13 or .12 could be loaded; install jax[cuda13], or add its folder to "
        "LD_LIBRARY_PATH.";
    return loaded;
  }
  Runtime& cuda = loaded.runtime;
  loaded.usable = Find(library, "cudaGetErrorString", &cuda.GetErrorString) &&
                  Find(library, "cudaSetDevice", &cuda.SetDevice) &&
                  Find(library, "cudaStreamCreateWithFlags", &cuda.StreamCreateWithFlags) &&
                  Find(library, "cudaStreamSynchronize", &cuda.StreamSynchronize) &&
                  Find(library, "cudaStreamWaitEvent", &cuda.StreamWaitEvent) &&
                  Find(library, "cudaStreamIsCapturing", &cuda.StreamIsCapturing) &&
                  Find(library, "cudaEventCreateWithFlags", &cuda.EventCreateWithFlags) &&
                  Find(library, "cudaEventRecord", &cuda.EventRecord) &&
                  Find(library, "cudaMemcpyAsync", &cuda.MemcpyAsync) &&
                  (!cuda13 || Find(library, "cudaMemcpyBatchAsync", &cuda.MemcpyBatchAsync));
  if (!loaded.usable) loaded.why = "libcudart lacks a function that page copies need; install CUDA 12 or 13.";
  return loaded;
}

}  // namespace

const Runtime* LoadRuntime(std::string* why) {
  static const Loaded* loaded = new Loaded(Load());
  if (!loaded->usable) *why = loaded->why;
  return loaded->usable ? &loaded->runtime : nullptr;
}

}  // namespace hisparse::cuda
