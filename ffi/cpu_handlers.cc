// The CPU twins: the same targets, checks and order as cuda_handlers.cc, so that every test runs anywhere.
//
// A fork's copies run on a thread of their own, beside the program, and a join waits for them. With
// HISPARSE_FFI_LATE_COPIES set they run inside the join instead, as late as an asynchronous copy ever can: a
// program that writes a source page or reads a destination page between fork and join is then wrong every
// time.
#include <cstdlib>
#include <cstring>
#include <future>
#include <mutex>
#include <unordered_map>

#include "page_copies.h"

namespace hisparse {
namespace {

void Copy(const PageCopies& copies) {
  for (const PageCopy& page : copies.pages) std::memcpy(page.to, page.from, copies.page_bytes);
}

// Copies in flight, by the pool they write. A std::async future waits for its thread when it is destroyed, so
// forgetting a fork, also one that a failed program left open, ends its copies.
class OpenForks {
 public:
  void Start(const Call& call, PageCopies copies) {
    const bool late = std::getenv("HISPARSE_FFI_LATE_COPIES") != nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    forks_.erase(call.pool.untyped_data());
    forks_[call.pool.untyped_data()] = {call.slab.untyped_data(),
                                        std::async(late ? std::launch::deferred : std::launch::async,
                                                   [copies = std::move(copies)] { Copy(copies); })};
  }

  ffi::Error Finish(const Call& call) {
    Fork fork;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto open = forks_.find(call.pool.untyped_data());
      if (open == forks_.end()) return NothingForked(call);
      fork = std::move(open->second);
      forks_.erase(open);
    }
    fork.done.wait();
    return fork.slab == call.slab.untyped_data() ? ffi::Error::Success() : SlabMoved(call);
  }

  // Ends every copy in flight and returns `error`: a program that fails leaves nothing running.
  ffi::Error Abandon(const ffi::Error& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    forks_.clear();
    return error;
  }

 private:
  struct Fork {
    const void* slab = nullptr;
    std::future<void> done;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Fork> forks_;
};

OpenForks& Forks() {
  static auto* forks = new OpenForks;  // never destroyed: a handler may still run at exit
  return *forks;
}

ffi::Error BackupPages(Bytes pool, Bytes slab, Ids source, Ids destination, BytesResult result,
                       int64_t offset, std::string_view layer) {
  const Call call{"backup_pages", layer, pool, slab};
  auto copies = PlanCopies(call, Direction::kBackup, offset, source, destination, *result);
  if (copies.has_error()) return Forks().Abandon(copies.error());
  Copy(*copies);
  return ffi::Error::Success();
}

ffi::Error ForkBackup(Bytes pool, Bytes slab, Ids source, Ids destination, BytesResult result, int64_t offset,
                      std::string_view layer) {
  const Call call{"backup_pages_fork", layer, pool, slab};
  auto copies = PlanCopies(call, Direction::kBackup, offset, source, destination, *result);
  if (copies.has_error()) return Forks().Abandon(copies.error());
  Forks().Start(call, std::move(*copies));
  return ffi::Error::Success();
}

ffi::Error JoinBackup(Bytes pool, Bytes slab, BytesResult result, std::string_view layer) {
  const Call call{"backup_pages_join", layer, pool, slab};
  if (ffi::Error error = CheckInPlace(call, pool, *result); error.failure()) return Forks().Abandon(error);
  if (ffi::Error error = Forks().Finish(call); error.failure()) return Forks().Abandon(error);
  return ffi::Error::Success();
}

ffi::Error RestorePages(Bytes pool, Bytes slab, Ids source, Ids destination, BytesResult result,
                        int64_t offset, std::string_view layer) {
  const Call call{"restore_pages", layer, pool, slab};
  auto copies = PlanCopies(call, Direction::kRestore, offset, source, destination, *result);
  if (copies.has_error()) return Forks().Abandon(copies.error());
  Copy(*copies);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_backup_pages_cpu, BackupPages, BindBackup(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_backup_pages_fork_cpu, ForkBackup, BindBackup(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_backup_pages_join_cpu, JoinBackup, BindJoin(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(hisparse_restore_pages_cpu, RestorePages, BindRestore(ffi::Ffi::Bind()));

}  // namespace hisparse
