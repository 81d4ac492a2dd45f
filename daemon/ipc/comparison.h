// Policies compared on what a model really routed to: a bounded window of its latest events, with what the
// live policy and each challenger had hit of every event, against a policy that knows the window's future and
// may leave a miss where it is (Belady with bypass). Not the core loop's: whoever asks pays.
//
// Thread: any one at a time. Memory: two bytes an id, kWindowIdsMax ids in all, and twelve an event.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/ipc/routing_tap.h"
#include "daemon/ipc/shadows.h"

namespace moecached {

class EventWindow {
 public:
  static constexpr std::size_t kIdsMax = 8u << 20;

  struct LayerEvents {
    std::vector<std::uint16_t> ids;
    std::vector<std::uint32_t> ends;  // of each event, in ids
    std::vector<std::uint64_t> hits;  // of each event, as ShadowSet::tap has them
  };
  EventWindow(std::shared_ptr<RoutingTap> tap, std::size_t n_layers, std::size_t ids_max = kIdsMax);
  // Everything that the tap has now; when the window is full the older half of it goes.
  void drain();
  [[nodiscard]] const std::vector<LayerEvents>& layers() const { return layers_; }
  [[nodiscard]] std::uint64_t dropped() const { return tap_->dropped(); }
  [[nodiscard]] std::uint64_t forgotten() const { return forgotten_; }    // ids that were in it once
  [[nodiscard]] bool is_orphan() const { return tap_.use_count() == 1; }  // nobody fills it any more

 private:
  void forget_older_half();
  std::shared_ptr<RoutingTap> tap_;
  const std::size_t ids_max_;
  std::vector<LayerEvents> layers_;
  std::size_t n_ids_ = 0;
  std::uint64_t forgotten_ = 0;
  std::vector<std::uint32_t> experts_;  // scratch
};

// One policy in one layer.
struct PolicyScore {
  std::uint64_t lookups = 0, hits = 0, uploads = 0;  // since the challengers began
  std::uint64_t link_experts = 0;                    // uploads, and on a GPU misses, which cross the link too
  std::uint64_t window_hits = 0;
  std::uint64_t covered = 0;  // lookups of the window that went to experts which are resident now
};

struct LayerComparison {
  std::uint32_t block = 0, n_experts = 0, n_slots = 0;
  std::uint64_t window_lookups = 0;
  std::uint64_t belady_hits = 0, belady_uploads = 0;  // with bypass, on the window, from an empty pool
  std::uint64_t belady_hits_fewer = 0;                // the same with three quarters of the slots
  double gini = 0, entropy_bits = 0;                  // of the window's uses
  std::vector<PolicyScore> policies;                  // the live one first
};

struct PolicyComparison {
  std::uint32_t model = 0;
  std::vector<std::string> policies;  // specs, the live one first
  std::vector<LayerComparison> layers;
  std::uint64_t dropped = 0;    // events that found the tap full
  std::uint64_t forgotten = 0;  // lookups that are not in the window any more
  std::vector<std::string> advice;
};

// What only the core loop knows, of one moment.
struct ShadowSnapshot {
  std::vector<std::uint32_t> blocks;
  std::uint32_t n_expert_used = 0;
  ModelShape shape;
  MissMode mode = MissMode::kPool;
  std::vector<std::string> policies;
  std::vector<std::vector<LayerCounters>> counters;  // [policy][layer], since the challengers began
  std::vector<std::vector<std::uint8_t>> resident;   // [policy], layer by layer an entry an expert
};

[[nodiscard]] PolicyComparison compare(const ShadowSnapshot& snapshot, const EventWindow& window);
// Slots for fewer than two tokens; slots past the knee; a challenger that is clearly better.
[[nodiscard]] std::vector<std::string> advice(const PolicyComparison& comparison,
                                              std::uint32_t n_expert_used);

}  // namespace moecached
