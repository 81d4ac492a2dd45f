// Challengers of a model's policy: each sees every routing event that the live policy sees, in a pool of the
// same slots whose loads take no time (InstantPool), and loads nothing. What each had hit goes, with the
// event, into a tap: whoever compares reads it elsewhere (comparison.h), where Belady is run as well.
//
// Thread: core loop; make() on any. Memory: sized by make(). Cost: that of the challengers' brains, measured
// per event by moecache-sim; none where a model has no challengers.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/ipc/routing_tap.h"
#include "daemon/residency/instant_pool.h"

namespace moecached {

inline constexpr std::size_t kChallengersMax = 3;

// The challengers of one model, and where their events go.
struct ShadowSet {
  ModelId model;
  ModelShape shape;  // of the live pool, with its policy
  MissMode mode = MissMode::kPool;
  std::vector<std::string> specs;
  std::vector<std::unique_ptr<InstantPool>> pools;
  std::shared_ptr<RoutingTap>
      tap;  // RoutingEvent::lane: hits of the event, 16 bits each, the live policy's first
  std::vector<LayerCounters> live_before;          // by layer
  std::vector<std::vector<LayerCounters>> before;  // of each challenger: what preloading counted

  // kInvalid: a spec that cannot be, more than kChallengersMax.
  static Result<std::unique_ptr<ShadowSet>> make(ModelId model, ModelShape shape, MissMode mode,
                                                 std::vector<std::string> specs);
};

class Shadows {
 public:
  // In place of those the model has. They begin with what is resident now and with the live history.
  Status start(std::unique_ptr<ShadowSet> set, Brain& live);
  void stop(ModelId model) { sets_.erase(model.value); }
  [[nodiscard]] bool is_empty() const { return sets_.empty(); }
  [[nodiscard]] const ShadowSet* find(ModelId model) const;
  // Behind the live brain's own event.
  void event(ModelId model, LayerIndex layer, std::span<const ExpertIndex> experts, Phase phase,
             std::uint64_t live_hits) noexcept;

 private:
  std::map<std::uint32_t, std::unique_ptr<ShadowSet>> sets_;  // by model
};

}  // namespace moecached
