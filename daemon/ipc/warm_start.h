// What a model is known by between two starts of the daemon, and what was saved of it: hot lists by label of
// session. Also the order in which the hottest experts are loaded into free slots before anyone asks.
// Thread: load() and save() from any but the core loop, since they read and write files; the rest anywhere.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/ipc/use_counts.h"
#include "daemon/model/model_layout.h"
#include "daemon/platform/file.h"
#include "daemon/residency/brain.h"
#include "daemon/warmth/state_directory.h"

namespace moecached {

struct WarmStart {
  std::uint64_t key = 0;
  std::vector<UseList> lists;  // fitted to the layout
};

// Of the layout, the sizes of the files and the model's name: the same wherever the files lie. A fine-tune of
// equal shape and name is taken for the same: its hot lists are worse then, and nothing else.
[[nodiscard]] std::uint64_t model_key(const ModelLayout& layout, std::span<const FileIdentity> files);
[[nodiscard]] std::vector<BlockShape> shapes_of(const ModelLayout& layout);

class WarmthStore {
 public:
  // "" or "none": nothing is saved. A directory that cannot be had is logged, and nothing is saved.
  explicit WarmthStore(const std::string& directory);
  // A file that cannot be used is said and left alone until it is written anew.
  [[nodiscard]] WarmStart load(const ModelLayout& layout, std::span<const FileIdentity> files);
  void save(std::span<const UseCounts::Saved> models);

 private:
  std::mutex mutex_;
  std::optional<StateDirectory> directory_;
};

// Uses per step of every expert, for Brain::seed: a step uses `n_expert_used` experts of a layer.
[[nodiscard]] std::vector<std::vector<double>> rates_of(const UseList& list, std::uint32_t n_expert_used);

// Experts to be loaded, the hottest of every layer first, as many as a layer has free slots, none that was
// never used.
class PrewarmPlan {
 public:
  struct Step {
    LayerIndex layer;
    ExpertIndex expert;
  };
  PrewarmPlan() = default;
  PrewarmPlan(const UseList& list, const Brain& brain, ModelId model);
  [[nodiscard]] bool is_done() const { return next_ == steps_.size(); }
  [[nodiscard]] std::size_t size() const { return steps_.size(); }
  // What is left of the other, behind: experts that both name are loaded once.
  void append(const PrewarmPlan& other) {
    steps_.insert(steps_.end(), other.steps_.begin() + static_cast<std::ptrdiff_t>(other.next_),
                  other.steps_.end());
  }
  [[nodiscard]] Step take() { return steps_[next_++]; }  // REQUIRES: !is_done()

 private:
  std::vector<Step> steps_;
  std::size_t next_ = 0;
};

}  // namespace moecached
