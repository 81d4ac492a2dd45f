// What GpuService remembers, shared by its files: gpu_service.cc (models, sessions, the turn), gpu_lanes.cc
// (lanes and their logs), gpu_growth.cc (device slots), gpu_promotions.cc (what goes into them),
// gpu_queues.cc (commands of the brain, work of the GPUs' queues) and gpu_reports.cc. Thread: core loop.
// Memory: owned by GpuService.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/ipc/gpu_service.h"

namespace moecached {

// A lane that does not move for this long counts as stopped.
inline constexpr std::uint64_t kGpuStalledAfterNs = 1'000'000'000;
// Promotions under way at once, for each model: enough to keep the copy stream busy while others wait for
// grace periods.
inline constexpr std::uint32_t kPromotionsMax = 48;

// A word that a client or its GPU writes.
inline std::uint64_t load_word(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

struct GpuService::Device {
  std::unique_ptr<Gpu> gpu;
  std::unique_ptr<GpuQueue> queue;  // made with the first model
  UploadBudget budget{UploadBudget::Options{}};
  bool lost = false;
};

struct GpuService::Entry {
  enum class Growth : std::uint8_t { kNone, kAllocating, kMapping, kDone };
  struct Candidate {
    double gain;
    LayerIndex layer;
    ExpertIndex expert;
    Phase phase = Phase::kDecode;
    bool operator<(const Candidate& other) const { return gain > other.gain; }
  };
  [[nodiscard]] bool is_growing() const {
    return growth == Growth::kAllocating || growth == Growth::kMapping;
  }

  void see(std::size_t layer) {  // in an epoch's log, which names each layer once
    passed_twice = passed_twice || seen[layer] != 0;
    seen[layer] = 1;
  }

  std::shared_ptr<GpuModel> model;
  Device* device = nullptr;
  Growth growth = Growth::kNone;
  std::uint64_t growth_tried_ns = 0;
  bool growth_is_over = false;  // no more chunks can be added
  std::string growth_note;      // why there are fewer slots than asked for
  SlotScope scope = SlotScope::kLayer;
  std::vector<std::uint8_t> seen;     // layers that this GPU has computed
  std::vector<std::uint32_t> n_open;  // device slots that the brain may use, by layer
  std::vector<std::uint32_t> even;    // that fit when they were added last, the same share of each layer
  bool shared_out = false;  // scope global: what the first growth left has been given to those in need
  std::uint64_t first_log_ns = 0, decoded = 0;  // tokens
  bool passed_twice = false;                    // a layer was seen in two epochs: there are no others
  std::string policy;
  UseList warm;  // what device slots are to begin with; empty: nothing is known
  PrewarmPlan plan;
  bool has_slots = false;        // the brain knows the model
  std::uint32_t promotions = 0;  // under way, as of this turn
  std::vector<Candidate> candidates;
  std::vector<std::uint8_t> all_resident;
  std::vector<std::uint32_t> publishing;          // by layer: flips to device slots that are not done yet
  std::uint32_t fill_layer = 0, fill_expert = 0;  // of the first fill, when everything is to be resident
  std::uint64_t load_begun_ns = 0;
  std::uint64_t costs_told_ns = 0;
};

struct GpuService::Lane {
  std::uint64_t key = 0;
  LaneId id;
  Entry* entry = nullptr;
  moecached_shm_lane* words = nullptr;
  std::byte* log = nullptr;
  std::uint64_t drained = 0;
  std::shared_ptr<LabelUses> uses;  // of the session's label
  bool known_to_brain = false;
  std::uint64_t begun = 0, begun_since_ns = 0;
  std::uint64_t records = 0, refused = 0;
};

struct GpuService::Growth {  // known when the call has run
  Status outcome = ok();
  std::vector<std::uint32_t> n_slots, even;
};

struct GpuService::Pending {
  enum class Kind : std::uint8_t { kUnpublish, kPublish, kCopy, kGrow, kRelease } kind = Kind::kPublish;
  std::shared_ptr<GpuModel> model;  // kept alive: copies write into it
  LayerIndex layer;
  ExpertIndex expert;
  SlotIndex slot;
  std::shared_ptr<Growth> growth;
};

}  // namespace moecached
