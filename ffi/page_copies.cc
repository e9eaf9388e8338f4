#include "page_copies.h"

#include <algorithm>
#include <string>

namespace hisparse {
namespace {

constexpr int32_t kNullBlock = 0;

std::string Message(const Call& call, const std::string& why) {
  return std::string(call.what) + ": " + std::string(call.layer) + ": " + why;
}

ffi::Error Refuse(const Call& call, const std::string& why) {
  return ffi::Error::InvalidArgument(Message(call, why));
}

// One side of the copies: which tier, and how many blocks it has.
struct Side {
  const char* role;
  const char* tier;
  int64_t blocks;

  bool Holds(int32_t id) const { return id >= 0 && id < blocks; }
  std::string Name(int32_t id) const {
    return std::string(role) + " " + tier + " block " + std::to_string(id);
  }
};

ffi::Error OutOfRange(const Call& call, const Side& side, int32_t id, size_t page) {
  return Refuse(call, side.Name(id) + " of page " + std::to_string(page) + " is not one of the " +
                          std::to_string(side.blocks) + " blocks of this tier (0.." +
                          std::to_string(side.blocks - 1) + ", 0 skips the page).");
}

}  // namespace

ffi::Error CheckInPlace(const Call& call, const Bytes& operand, const Bytes& result) {
  if (operand.untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return ffi::Error::Internal(
      Message(call, "the result has a buffer of its own; alias it with its operand."));
}

ffi::ErrorOr<PageCopies> PlanCopies(const Call& call, Direction direction, int64_t offset, const Ids& source,
                                    const Ids& destination, const Bytes& result) {
  const bool backup = direction == Direction::kBackup;
  if (ffi::Error error = CheckInPlace(call, backup ? call.pool : call.slab, result); error.failure())
    return error;
  const int64_t page_bytes = call.pool.dimensions()[1];
  const int64_t stride = call.slab.dimensions()[1];
  if (offset < 0 || offset > stride - page_bytes) {
    return Refuse(call, "a page of " + std::to_string(page_bytes) + " bytes at offset " +
                            std::to_string(offset) + " does not fit in a block of " + std::to_string(stride) +
                            " bytes.");
  }
  const size_t count = source.element_count();
  if (destination.element_count() != count) {
    return Refuse(call, std::to_string(count) + " source ids, " +
                            std::to_string(destination.element_count()) +
                            " destination ids; pad the shorter with block 0.");
  }
  const Side gpu{backup ? "source" : "destination", "GPU", call.slab.dimensions()[0]};
  const Side host{backup ? "destination" : "source", "host", call.pool.dimensions()[0]};
  const Side& from_side = backup ? gpu : host;
  const Side& to_side = backup ? host : gpu;

  PageCopies copies{{}, static_cast<size_t>(page_bytes)};
  std::vector<int32_t> written;
  for (size_t page = 0; page < count; ++page) {
    const int32_t from = source.typed_data()[page];
    const int32_t to = destination.typed_data()[page];
    if (!from_side.Holds(from)) return OutOfRange(call, from_side, from, page);
    if (!to_side.Holds(to)) return OutOfRange(call, to_side, to, page);
    if (from == kNullBlock || to == kNullBlock) continue;
    written.push_back(to);
    uint8_t* in_slab = call.slab.typed_data() + (backup ? from : to) * stride + offset;
    uint8_t* in_pool = call.pool.typed_data() + (backup ? to : from) * page_bytes;
    copies.pages.push_back(backup ? PageCopy{in_slab, in_pool} : PageCopy{in_pool, in_slab});
  }
  std::sort(written.begin(), written.end());
  if (auto twice = std::adjacent_find(written.begin(), written.end()); twice != written.end()) {
    return Refuse(call, to_side.Name(*twice) + " is named twice; two pages cannot stand in one block.");
  }
  return copies;
}

ffi::Error NothingForked(const Call& call) {
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      Message(call, "no fork is open on this pool; fork and join stand in one program, on one pool."));
}

ffi::Error SlabMoved(const Call& call) {
  return ffi::Error(
      ffi::ErrorCode::kFailedPrecondition,
      Message(call,
              "the slab has another buffer than at the fork, so pages may have been overwritten under "
              "the copy; donate the slab and thread it from fork to join."));
}

}  // namespace hisparse

// The FFI version of the headers this library was built with: major * 1000 + minor.
extern "C" __attribute__((visibility("default"))) int hisparse_ffi_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}
