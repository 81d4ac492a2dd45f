// Finds stray writes into pools: looks at every slot of every pool once a period, whether it still holds the
// bytes of its expert. At its first visit to an expert in a slot it compares with the file, read anew, and
// keeps a checksum of that; later it compares with the checksum. What it finds it tells the core loop, which
// has the expert read again. It cannot undo what clients computed meanwhile. Not looked at: the memory of
// models on GPUs, and slots between a read and their first visit that are evicted before it.
//
// A slot is visited once a period at its own time, so that a write is found within one period, unless
// bytes_per_second stretches it. Thread: one of its own, which waits for nearly all of its time; it reads
// pools by their descriptors, so that it gives no memory to slots that have none. Memory: 24 bytes a slot,
// and one expert.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "daemon/ipc/shared_model.h"
#include "daemon/tier/ssd_tier.h"

struct XXH3_state_s;

namespace moecached {

class Core;

// The parts of an expert as they are in the file, on their way to the scrubber.
struct FileCopy {
  std::vector<std::byte> bytes;
  std::promise<ReadResult> done;
};

class Scrubber {
 public:
  struct Pace {
    std::uint64_t period_ns = 0;
    std::uint64_t bytes_per_second = 0;  // 0: no limit
  };
  // core's loop must run for as long as this lives: the destructor waits for a read that is under way.
  Scrubber(Core& core, Pace pace);
  ~Scrubber();
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  // What one round over a pool takes: the period, or longer where bytes_per_second is too little for that. Of
  // the slowest pool. Any thread.
  [[nodiscard]] std::uint64_t round_ns() const { return round_ns_.load(std::memory_order_relaxed); }

 private:
  struct Place {
    LayerIndex layer;
    SlotIndex slot;
  };
  struct Known {
    std::uint64_t checksum = 0;
    std::uint32_t stays = 0;  // of the residence that it is of; 0: none yet
    bool has_checksum = false;
    std::int64_t right_at_s = 0;
  };
  struct Round {
    std::weak_ptr<SharedModel> model;
    std::vector<Place> places;
    std::vector<Known> known;  // by place
    std::size_t next = 0;
    std::uint64_t began_ns = 0;
    std::uint64_t round_ns = 0;  // of the last one
  };
  struct HashDeleter {
    void operator()(XXH3_state_s* state) const;
  };

  void run();
  void look_for_pools();
  [[nodiscard]] std::uint64_t due_ns(const Round& round) const;
  void step(Round& round);
  void visit(const std::shared_ptr<SharedModel>& model, Place place, Known& known);
  [[nodiscard]] std::optional<std::uint64_t> checksum_of_slot(SharedModel& model, Place place);
  [[nodiscard]] std::optional<std::uint64_t> checksum_of_file(const std::shared_ptr<SharedModel>& model,
                                                              LayerIndex layer, ExpertIndex expert);

  Core& core_;
  const Pace pace_;
  std::unique_ptr<XXH3_state_s, HashDeleter> hash_;
  std::vector<std::byte> piece_;
  std::map<std::uint32_t, Round> rounds_;  // by model
  std::uint64_t busy_until_ns_ = 0;        // the bytes read so far are paid for then
  std::atomic<std::uint64_t> round_ns_;
  std::mutex mutex_;
  std::condition_variable wakes_;
  bool stops_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace moecached
