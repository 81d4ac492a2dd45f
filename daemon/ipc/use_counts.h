// Which experts were decoded with, by model and by the label of the session: counted on the core loop, saved
// and given back at the next start (warm_start.h). A hot path: add() neither allocates nor locks. Prompts are
// not counted, as policies do not learn from them. Old use fades: a layer's counts are halved when they have
// become many.
//
// Thread: core loop. Memory: four bytes an expert of each label, kUseLabelsMax labels a model; sessions with
// further labels share the last list.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/warmth/use_list.h"

namespace moecached {

class LabelUses {
 public:
  static constexpr std::uint64_t kLayerUsesMax = 1u << 24;

  LabelUses(std::string label, std::span<const BlockShape> shapes);
  // Of a list that was fitted to the shapes.
  void restore(const UseList& list);
  void add(LayerIndex layer, std::span<const ExpertIndex> experts) noexcept;
  [[nodiscard]] const std::string& label() const { return label_; }
  [[nodiscard]] bool is_empty() const;
  [[nodiscard]] UseList list(std::span<const BlockShape> shapes) const;

 private:
  friend class UseCounts;
  std::string label_;
  std::vector<std::uint32_t> first_;   // of a layer in counts_, and the end
  std::vector<std::uint32_t> counts_;  // at most kLayerUsesMax each
  std::vector<std::uint64_t> totals_;  // by layer
  bool changed_ = false;
};

class UseCounts {
 public:
  struct Saved {
    std::uint64_t key = 0;
    std::string model;
    std::vector<UseList> lists;
  };

  // Models of one key (a file served on a CPU and on a GPU) are counted together. lists: fitted.
  void add_model(ModelId id, std::uint64_t key, const std::string& name, std::span<const BlockShape> shapes,
                 std::span<const UseList> lists);
  void remove_model(ModelId id);
  // For a lane to keep. Null: no such model.
  [[nodiscard]] std::shared_ptr<LabelUses> of_label(ModelId id, const std::string& label);
  [[nodiscard]] std::span<const BlockShape> shapes(ModelId id) const;
  // Counts of models that were used since the last call, those that were dropped meanwhile as well.
  [[nodiscard]] std::vector<Saved> take_changed();

 private:
  static constexpr std::size_t kRetiredMax = 16;
  struct Model {
    std::uint64_t key = 0;
    std::string name;
    std::uint32_t n_users = 0;
    std::vector<BlockShape> shapes;
    std::vector<std::shared_ptr<LabelUses>> labels;
  };
  static void save(Model& model, std::vector<Saved>* out);
  [[nodiscard]] Model* find(ModelId id) const;
  std::map<std::uint64_t, std::unique_ptr<Model>> models_;  // by key
  std::map<std::uint32_t, std::uint64_t> keys_;             // by model id
  std::vector<Saved> retired_;
};

}  // namespace moecached
