// What GpuService remembers, shared by its files: gpu_service.cc (models, sessions, the turn), gpu_lanes.cc
// (lanes and their logs), gpu_growth.cc (device slots), gpu_promotions.cc (what goes into them),
// gpu_queues.cc (commands of the brain, work of the GPUs' queues), gpu_peers.cc (slots of other GPUs) and
// gpu_reports.cc. Thread: core loop.
// Memory: owned by GpuService.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/ipc/gpu_log.h"
#include "daemon/ipc/gpu_service.h"

namespace moecached {

// A lane that does not move for this long counts as stopped.
inline constexpr std::uint64_t kGpuStalledAfterNs = 1'000'000'000;
// Promotions under way at once, for each model: enough to keep the copy stream busy while others wait for
// grace periods.
inline constexpr std::uint32_t kPromotionsMax = 48;

// What the copy engine moves at 55 GB/s, the fetch kernel reads at 48.
inline constexpr double kInPlacePerCopyRate = 0.87;

// A word that a client or its GPU writes.
inline std::uint64_t load_word(std::uint64_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

struct GpuService::Path {  // by which a GPU reads another's memory
  enum class State : std::uint8_t { kUnknown, kMeasuring, kUsed, kNotUsed } state = State::kUnknown;
  std::shared_ptr<Result<double>> measured;  // bytes per second, not looked at yet
  std::uint64_t not_before_ns = 0;           // after a fault that may pass
  double rate = 0;
  std::string why_not;  // it is not used
};

struct GpuService::Device {
  std::unique_ptr<Gpu> gpu;
  std::unique_ptr<GpuQueue> queue;  // made with the first model
  UploadBudget budget{UploadBudget::Options{}};
  std::atomic<bool> lost = false;  // written by the core loop
  SpillUse spill_use;
  std::uint32_t group = 0;  // of GPUs that can read each other's memory
  GpuSections place;        // in the group
  std::map<const Device*, Path> paths;
};

struct GpuService::Peer {  // whose slots an entry's lanes may read
  Entry* entry = nullptr;
  std::uint32_t version = 0;  // of its slots, that are mapped or being mapped
  double rate = 0;
  bool is_mapping = false;
  std::vector<std::uint32_t> n_visible, n_coming;  // of its slots, by layer
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
  // -- slots of other GPUs
  std::vector<Peer> peers;
  std::uint32_t slots_version = 0;           // grows with n_open
  std::uint32_t sessions_without_peers = 0;  // that cannot map them: no entry names them meanwhile
  std::string no_peers_reason;               // of the last of them
  std::deque<std::pair<LayerIndex, ExpertIndex>> stale;  // entries that may not name the best place
  std::vector<std::vector<std::uint8_t>> is_stale;       // by layer, expert
  std::size_t repointing = 0;                            // flips under way
  bool is_held = false;                                  // no lane may begin before they are done

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
  std::unique_ptr<GpuLogReader> reader;
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
  enum class Kind : std::uint8_t {
    kUnpublish,
    kPublish,
    kRepoint,
    kCopy,
    kGrow,
    kRelease,
    kMeasure
  } kind = Kind::kPublish;
  std::shared_ptr<GpuModel> model;   // kept alive: copies write into it
  std::shared_ptr<GpuModel> reader;  // kUnpublish: whose table is flipped
  LayerIndex layer;
  ExpertIndex expert;
  SlotIndex slot;
  std::shared_ptr<std::size_t> flips_left;  // kUnpublish: of all tables
  std::shared_ptr<Growth> growth;
  Path* path = nullptr;  // kMeasure; as long-lived as the service
  std::shared_ptr<Result<double>> measured;
};

}  // namespace moecached
