// The CPU twins: the same targets, checks and order as cuda_handlers.cc, so that every test runs anywhere.
//
// A fork's copies run on a thread of their own, beside the program, and a join waits for them. With
// HISPARSE_FFI_LATE_COPIES set they run inside the join instead, as late as an asynchronous copy ever can: a
// program that writes the source or reads the destination between fork and join is then wrong every time.
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

// Copies in flight, by the pool they write.
class OpenForks {
 public:
  void Start(const void* pool, const void* slab, PageCopies copies) {
    const bool late = std::getenv("HISPARSE_FFI_LATE_COPIES") != nullptr;
    auto run = [copies = std::move(copies)] { Copy(copies); };
    Fork fork{slab, std::async(late ? std::launch::deferred : std::launch::async, std::move(run))};
    std::lock_guard<std::mutex> lock(mutex_);
    // A fork still open here was left by a program that failed: its future waits when it is replaced.
    if (auto open = forks_.find(pool); open != forks_.end()) open->second.done.wait();
    forks_.insert_or_assign(pool, std::move(fork));
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

  // Waits for every copy in flight and returns `error`: a program that fails leaves nothing running.
  ffi::Error Abandon(ffi::Error error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [pool, fork] : forks_) fork.done.wait();
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
  static OpenForks* forks = new OpenForks;  // never destroyed: handlers may still run at exit
  return *forks;
}

ffi::Error BackupPages(Bytes pool, Bytes slab, Ids source, Ids destination, BytesResult result, int64_t offset,
                       std::string_view layer) {
  const Call call{"backup_pages", layer, pool, slab};
  if (ffi::Error error = CheckInPlace(call, pool, *result); error.failure()) return Forks().Abandon(error);
  auto copies = PlanCopies(call, Direction::kBackup, offset, source, destination);
  if (copies.has_error()) return Forks().Abandon(copies.error());
  Copy(*copies);
  return ffi::Error::Success();
}

ffi::Error ForkBackup(Bytes pool, Bytes slab, Ids source, Ids destination, BytesResult result, int64_t offset,
                      std::string_view layer) {
  const Call call{"backup_pages_fork", layer, pool, slab};
  if (ffi::Error error = CheckInPlace(call, pool, *result); error.failure()) return Forks().Abandon(error);
  auto copies = PlanCopies(call, Direction::kBackup, offset, source, destination);
  if (copies.has_error()) return Forks().Abandon(copies.error());
  Forks().Start(pool.untyped_data(), slab.untyped_data(), std::move(*copies));
  return ffi::Error::Success();
}

ffi::Error JoinBackup(Bytes pool, Bytes slab, BytesResult result, std::string_view layer) {
  const Call call{"backup_pages_join", layer, pool, slab};
  if (ffi::Error error = CheckInPlace(call, pool, *result); error.failure()) return Forks().Abandon(error);
  if (ffi::Error error = Forks().Finish(call); error.failure()) return Forks().Abandon(error);
  return ffi::Error::Success();
}

ffi::Error RestorePages(Bytes pool, Bytes slab, Ids source, Ids destination, BytesResult result, int64_t offset,
                        std::string_view layer) {
  const Call call{"restore_pages", layer, pool, slab};
  if (ffi::Error error = CheckInPlace(call, slab, *result); error.failure()) return Forks().Abandon(error);
  auto copies = PlanCopies(call, Direction::kRestore, offset, source, destination);
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
