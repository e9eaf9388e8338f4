// Page copies by DMA or by a kernel, on XLA's stream or beside it.
//
// Handlers run on the host when XLA enqueues the program: they read the ids, enqueue copies, and return. A
// fork makes a private stream of the device wait for XLA's stream as it stands, and enqueues there; a join
// makes XLA's stream wait for that fork's last copy. None of the handlers blocks, except where one fails:
// then every forked copy of the device has ended before the error is returned. They are not marked as
// capturable: the ids, and so the copies, differ from call to call.
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_calls.h"
#include "page_copies.h"
#include "page_kernel.h"

namespace hisparse {
namespace {

using cuda::Event;
using cuda::Runtime;
using cuda::Stream;

// How pages can be copied. On an H200, CUDA 13, scattered pages of 37 KB move at 13 to 15 GB/s by one DMA
// each, at 20 to 28 GB/s by a batched DMA, at 49 to 52 GB/s by a kernel's stores.
enum class Way { kEach, kBatch, kKernel };

// The table of choices: the first line whose number of pages is reached, and whose way is there, is taken. A
// forked copy runs beside compute and is hidden, so it is better off leaving the multiprocessors alone.
struct Choice {
  bool forked;
  size_t from_pages;
  Way way;
};
constexpr Choice kChoices[] = {
    {false, 1, Way::kKernel}, {false, 4, Way::kBatch}, {false, 0, Way::kEach},
    {true, 4, Way::kBatch},   {true, 0, Way::kEach},
};

// Blocks of a copying kernel: enough for the link, a fraction of the GPU.
constexpr int64_t kKernelBlocks = 132;

// HISPARSE_PAGE_COPIES=each, batch or kernel overrules the table, for measuring.
std::optional<Way> ForcedWay() {
  const char* name = std::getenv("HISPARSE_PAGE_COPIES");
  if (name == nullptr) return std::nullopt;
  const std::string_view way = name;
  if (way == "each") return Way::kEach;
  if (way == "batch") return Way::kBatch;
  if (way == "kernel") return Way::kKernel;
  return std::nullopt;
}

class Device {
 public:
  Device(const Runtime* runtime, int ordinal) : cuda_(*runtime), ordinal_(ordinal) {}

  // Enqueues copies on XLA's stream.
  ffi::Error Run(const Call& call, const PageCopies& copies, Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ffi::Error error = Select(call); error.failure()) return error;
    return Enqueue(call, copies, stream, /*forked=*/false);
  }

  ffi::Error Fork(const Call& call, const PageCopies& copies, Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ffi::Error error = Select(call); error.failure()) return error;
    Event done = nullptr;
    if (ffi::Error error = TakeEvent(call, &done); error.failure()) return error;
    if (ffi::Error error = Check(call, "cudaEventRecord", cuda_.EventRecord(ready_, stream)); error.failure())
      return error;
    if (ffi::Error error = Wait(call, private_, ready_); error.failure()) return error;
    if (ffi::Error error = Enqueue(call, copies, private_, /*forked=*/true); error.failure()) return error;
    if (ffi::Error error = Check(call, "cudaEventRecord", cuda_.EventRecord(done, private_)); error.failure())
      return error;
    Forget(
        call.pool
            .untyped_data());  // left open by a program that failed elsewhere; the private stream keeps order
    forks_[call.pool.untyped_data()] = {call.slab.untyped_data(), done};
    return ffi::Error::Success();
  }

  ffi::Error Join(const Call& call, Stream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ffi::Error error = Select(call); error.failure()) return error;
    auto open = forks_.find(call.pool.untyped_data());
    if (open == forks_.end()) return NothingForked(call);
    if (open->second.slab != call.slab.untyped_data()) return SlabMoved(call);
    if (ffi::Error error = Wait(call, stream, open->second.done); error.failure()) return error;
    Forget(call.pool.untyped_data());
    return ffi::Error::Success();
  }

  // Ends every forked copy of this device and returns `error`: a program that fails leaves nothing running.
  ffi::Error Abandon(const ffi::Error& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (private_ != nullptr) {
      cuda_.SetDevice(ordinal_);
      const cuda::Status status = cuda_.StreamSynchronize(private_);
      if (status != cuda::kSuccess) {
        return ffi::Error::Internal(error.message() +
                                    " Then cudaStreamSynchronize: " + cuda_.GetErrorString(status));
      }
    }
    while (!forks_.empty()) Forget(forks_.begin()->first);
    return error;
  }

 private:
  struct OpenFork {
    const void* slab;
    Event done;
  };

  ffi::Error Check(const Call& call, const char* function, cuda::Status status) const {
    if (status == cuda::kSuccess) return ffi::Error::Success();
    return ffi::Error::Internal(std::string(call.what) + ": " + std::string(call.layer) + ": " + function +
                                ": " + cuda_.GetErrorString(status));
  }

  // Makes the device current on this thread and, the first time, makes its private stream.
  ffi::Error Select(const Call& call) {
    if (ffi::Error error = Check(call, "cudaSetDevice", cuda_.SetDevice(ordinal_)); error.failure())
      return error;
    if (private_ == nullptr) {
      const auto status = cuda_.StreamCreateWithFlags(&private_, cuda::kStreamNonBlocking);
      if (ffi::Error error = Check(call, "cudaStreamCreateWithFlags", status); error.failure()) return error;
    }
    if (ready_ == nullptr) {
      const auto status = cuda_.EventCreateWithFlags(&ready_, cuda::kEventDisableTiming);
      if (ffi::Error error = Check(call, "cudaEventCreateWithFlags", status); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error TakeEvent(const Call& call, Event* event) {
    if (spare_.empty()) {
      return Check(call, "cudaEventCreateWithFlags",
                   cuda_.EventCreateWithFlags(event, cuda::kEventDisableTiming));
    }
    *event = spare_.back();
    spare_.pop_back();
    return ffi::Error::Success();
  }

  // A wait binds to an event's last record, so an event may be recorded anew once its wait is enqueued.
  ffi::Error Wait(const Call& call, Stream stream, Event event) {
    return Check(call, "cudaStreamWaitEvent", cuda_.StreamWaitEvent(stream, event, 0));
  }

  void Forget(const void* pool) {
    auto open = forks_.find(pool);
    if (open == forks_.end()) return;
    spare_.push_back(open->second.done);
    forks_.erase(open);
  }

  ffi::Error Enqueue(const Call& call, const PageCopies& copies, Stream stream, bool forked) {
    int capturing = 0;  // a batched copy cannot be captured into a graph: it would fail, or be lost
    const auto status = cuda_.StreamIsCapturing(stream, &capturing);
    if (ffi::Error error = Check(call, "cudaStreamIsCapturing", status); error.failure()) return error;
    const bool has_batch = cuda_.MemcpyBatchAsync != nullptr && capturing == 0;
    const auto there = [&](Way way) {
      return way == Way::kEach || (way == Way::kBatch ? has_batch : kHasPageKernel);
    };
    Way way = Way::kEach;
    if (const std::optional<Way> forced = ForcedWay(); forced && there(*forced)) {
      way = *forced;
    } else {
      for (const Choice& choice : kChoices) {
        if (choice.forked != forked || copies.pages.size() < choice.from_pages || !there(choice.way))
          continue;
        way = choice.way;
        break;
      }
    }
    if (copies.pages.empty()) return ffi::Error::Success();
    if (way == Way::kKernel) return EnqueueKernel(call, copies, stream);
    return way == Way::kBatch ? EnqueueBatch(call, copies, stream) : EnqueueEach(call, copies, stream);
  }

  ffi::Error EnqueueKernel(const Call& call, const PageCopies& copies, Stream stream) {
    const std::vector<PageCopy>& pages = copies.pages;
    for (size_t first = 0; first < pages.size(); first += PagePlaces::kMax) {
      PagePlaces places{};
      for (size_t page = first; page < pages.size() && places.count < PagePlaces::kMax; ++page) {
        places.from[places.count] = pages[page].from;
        places.to[places.count++] = pages[page].to;
      }
      const auto status =
          LaunchPageCopies(stream, places, static_cast<int64_t>(copies.page_bytes), kKernelBlocks);
      if (ffi::Error error = Check(call, "page kernel", status); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error EnqueueEach(const Call& call, const PageCopies& copies, Stream stream) {
    for (const PageCopy& page : copies.pages) {
      const auto status =
          cuda_.MemcpyAsync(page.to, page.from, copies.page_bytes, cuda::kMemcpyDefault, stream);
      if (ffi::Error error = Check(call, "cudaMemcpyAsync", status); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error EnqueueBatch(const Call& call, const PageCopies& copies, Stream stream) {
    std::vector<void*> to;
    std::vector<const void*> from;
    for (const PageCopy& page : copies.pages) {
      to.push_back(page.to);
      from.push_back(page.from);
    }
    const std::vector<size_t> bytes(copies.pages.size(), copies.page_bytes);
    cuda::MemcpyAttributes attributes{cuda::kSrcAccessOrderStream, {}, {}, 0};
    size_t first = 0;  // the attributes hold from copy 0 on
    const auto status = cuda_.MemcpyBatchAsync(to.data(), from.data(), bytes.data(), bytes.size(),
                                               &attributes, &first, 1, stream);
    return Check(call, "cudaMemcpyBatchAsync", status);
  }

  const Runtime& cuda_;
  const int ordinal_;
  std::mutex mutex_;
  Stream private_ = nullptr;
  Event ready_ = nullptr;
  std::vector<Event> spare_;
  std::unordered_map<const void*, OpenFork> forks_;  // by pool
};

// Devices are made when first used and never destroyed: at exit the runtime may be gone before them.
ffi::ErrorOr<Device*> DeviceOf(const Call& call, int ordinal) {
  static std::mutex mutex;
  static auto* devices = new std::map<int, std::unique_ptr<Device>>;
  std::string why;
  const Runtime* runtime = cuda::LoadRuntime(&why);
  if (runtime == nullptr) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::string(call.what) + ": " + why);
  }
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = (*devices)[ordinal];
  if (device == nullptr) device = std::make_unique<Device>(runtime, ordinal);
  return device.get();
}

// What the copying handlers share: plan, then carry out by `enqueue`, and on any failure leave nothing
// running.
using EnqueueFn = ffi::Error (Device::*)(const Call&, const PageCopies&, Stream);
ffi::Error CopyPages(const Call& call, Direction direction, EnqueueFn enqueue, Stream stream, int ordinal,
                     const Ids& source, const Ids& destination, const Bytes& result, int64_t offset) {
  auto device = DeviceOf(call, ordinal);
  if (device.has_error()) return device.error();
  auto copies = PlanCopies(call, direction, offset, source, destination, result);
  if (copies.has_error()) return (*device)->Abandon(copies.error());
  if (ffi::Error error = ((*device)->*enqueue)(call, *copies, stream); error.failure()) {
    return (*device)->Abandon(error);
  }
  return ffi::Error::Success();
}

ffi::Error BackupPages(Stream stream, int32_t ordinal, Bytes pool, Bytes slab, Ids source, Ids destination,
                       BytesResult result, int64_t offset, std::string_view layer) {
  return CopyPages({"backup_pages", layer, pool, slab}, Direction::kBackup, &Device::Run, stream, ordinal,
                   source, destination, *result, offset);
}

ffi::Error ForkBackup(Stream stream, int32_t ordinal, Bytes pool, Bytes slab, Ids source, Ids destination,
                      BytesResult result, int64_t offset, std::string_view layer) {
  return CopyPages({"backup_pages_fork", layer, pool, slab}, Direction::kBackup, &Device::Fork, stream,
                   ordinal, source, destination, *result, offset);
}

ffi::Error RestorePages(Stream stream, int32_t ordinal, Bytes pool, Bytes slab, Ids source, Ids destination,
                        BytesResult result, int64_t offset, std::string_view layer) {
  return CopyPages({"restore_pages", layer, pool, slab}, Direction::kRestore, &Device::Run, stream, ordinal,
                   source, destination, *result, offset);
}

ffi::Error JoinBackup(Stream stream, int32_t ordinal, Bytes pool, Bytes slab, BytesResult result,
                      std::string_view layer) {
  const Call call{"backup_pages_join", layer, pool, slab};
  auto device = DeviceOf(call, ordinal);
  if (device.has_error()) return device.error();
  ffi::Error error = CheckInPlace(call, pool, *result);
  if (error.success()) error = (*device)->Join(call, stream);
  return error.success() ? error : (*device)->Abandon(error);
}

auto BindDevice() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<Stream>>().Ctx<ffi::DeviceOrdinal>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_backup_pages_cuda, BackupPages, BindBackup(BindDevice()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_backup_pages_fork_cuda, ForkBackup, BindBackup(BindDevice()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_backup_pages_join_cuda, JoinBackup, BindJoin(BindDevice()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_restore_pages_cuda, RestorePages, BindRestore(BindDevice()));

}  // namespace hisparse
