// The private slots of one layer: where this process reads experts itself when the daemon cannot serve them.
// A small LRU cache shared by the lanes of the process. A slot that some lane's epoch uses is pinned and
// never overwritten. It is not on the path of a hit; a lane takes its lock only when it falls back, or ends
// an epoch that did. Thread: any; the lock is held while a file is read, so lanes that fall back in one layer
// take turns. Memory: the slots belong to the WindowSet; their pages come into being when first written.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "client/include/moecached/moecached.h"

namespace moecached::client {

class PrivateSlots {
 public:
  struct Geometry {
    std::byte* window = nullptr;    // slot 0 of the layer
    std::uint64_t slot_stride = 0;  // bytes
    std::uint32_t first_slot = 0;   // first private slot id
    std::uint32_t n_slots = 0;
    std::uint32_t n_slots_usual = 0;  // the others are touched only when all of these are pinned
    std::uint32_t n_experts = 0;
    std::uint64_t shared_bytes = 0;  // of the window; behind them everything is private
    std::uint64_t private_bytes = 0;
  };
  // Reads one expert into a record.
  using Read = std::function<moecached_status(std::uint32_t expert, std::byte* record)>;

  explicit PrivateSlots(const Geometry& geometry);

  // Gives every expert a pinned slot holding its bytes: slots_out[i] is a slot id of the window, read_out[i]
  // says whether it had to be read. All or nothing: on failure no slot stays pinned. REQUIRES: experts are
  // distinct. MOECACHED_E_TOO_MANY: other lanes use the other slots, which cannot be when there is one for
  // each expert. It does not wait for them: that could be forever, since the other lane may belong to the
  // waiting thread.
  [[nodiscard]] moecached_status acquire(std::span<const std::uint16_t> experts, const Read& read,
                                         std::int32_t* slots_out, bool* read_out);
  // Ends the use of slots that acquire() returned.
  void release(std::span<const std::int32_t> slots);

 private:
  static constexpr std::int32_t kNone = -1;
  struct Slot {
    std::int32_t expert = kNone;
    std::uint32_t pins = 0;
    std::uint64_t last_use = 0;
  };

  moecached_status make_writable();
  std::int32_t victim();

  const Geometry geometry_;
  std::mutex mutex_;
  bool writable_ = false;
  std::uint32_t n_touched_;  // slots that may hold something: n_slots_usual, or more once that was too few
  std::uint64_t uses_ = 0;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> slot_of_;  // by expert; kNone or an index into slots_
};

}  // namespace moecached::client
