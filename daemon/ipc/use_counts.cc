#include "daemon/ipc/use_counts.h"

#include <algorithm>

#include "daemon/base/check.h"

namespace moecached {

LabelUses::LabelUses(std::string label, std::span<const BlockShape> shapes)
    : label_(std::move(label)), totals_(shapes.size()) {
  std::uint32_t n = 0;
  for (const BlockShape& shape : shapes) {
    first_.push_back(n);
    n += shape.n_experts;
  }
  first_.push_back(n);
  counts_.resize(n);
}

void LabelUses::restore(const UseList& list) {
  CHECK(list.layers.size() == totals_.size());
  for (std::size_t l = 0; l < totals_.size(); ++l) {
    const std::vector<std::uint64_t>& from = list.layers[l].counts;
    CHECK(from.size() == first_[l + 1] - first_[l]);
    // Into half of what is counted up to: what is used from now on weighs as much.
    std::uint64_t total = 0;
    for (const std::uint64_t count : from) total += std::min(count, kUseCountMax);
    std::uint32_t shift = 0;
    while ((total >> shift) > kLayerUsesMax / 2) ++shift;
    for (std::size_t e = 0; e < from.size(); ++e)
      counts_[first_[l] + e] = static_cast<std::uint32_t>(std::min(from[e], kUseCountMax) >> shift);
    totals_[l] = total >> shift;
  }
}

void LabelUses::add(LayerIndex layer, std::span<const ExpertIndex> experts) noexcept {
  std::uint32_t* counts = counts_.data() + first_[layer.value];
  for (const ExpertIndex expert : experts) ++counts[expert.value];
  totals_[layer.value] += experts.size();
  changed_ = true;
  if (totals_[layer.value] <= kLayerUsesMax) return;
  std::uint64_t total = 0;
  for (std::uint32_t i = first_[layer.value]; i < first_[layer.value + 1]; ++i) total += counts_[i] /= 2;
  totals_[layer.value] = total;
}

bool LabelUses::is_empty() const {
  return std::ranges::all_of(totals_, [](std::uint64_t total) { return total == 0; });
}

UseList LabelUses::list(std::span<const BlockShape> shapes) const {
  UseList out{.label = label_, .layers = {}};
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    out.layers.push_back(
        {.block = shapes[l].block, .counts = {counts_.begin() + first_[l], counts_.begin() + first_[l + 1]}});
  }
  return out;
}

UseCounts::Model* UseCounts::find(ModelId id) const {
  const auto key = keys_.find(id.value);
  return key == keys_.end() ? nullptr : models_.at(key->second).get();
}

void UseCounts::add_model(ModelId id, std::uint64_t key, const std::string& name,
                          std::span<const BlockShape> shapes, std::span<const UseList> lists) {
  // The key is a hash of names that a client may have chosen: a model of another shape is counted by itself,
  // and its list not found again.
  for (auto same = models_.find(key);
       same != models_.end() && !std::ranges::equal(same->second->shapes, shapes); same = models_.find(key))
    ++key;
  keys_[id.value] = key;
  std::unique_ptr<Model>& model = models_[key];
  if (!model) {
    model = std::make_unique<Model>();
    model->key = key;
    model->name = name;
    model->shapes.assign(shapes.begin(), shapes.end());
    for (const UseList& list : lists) {
      model->labels.push_back(std::make_shared<LabelUses>(list.label, shapes));
      model->labels.back()->restore(list);
    }
  }
  ++model->n_users;
}

void UseCounts::remove_model(ModelId id) {
  Model* model = find(id);
  if (model == nullptr) return;
  const std::uint64_t key = model->key;
  keys_.erase(id.value);
  if (--model->n_users > 0) return;
  // Those of a model that is dropped a second time before they were saved are in the newer ones already.
  std::erase_if(retired_, [key](const Saved& saved) { return saved.key == key; });
  save(*model, &retired_);
  if (retired_.size() > kRetiredMax) retired_.erase(retired_.begin());
  models_.erase(key);
}

std::shared_ptr<LabelUses> UseCounts::of_label(ModelId id, const std::string& label) {
  Model* model = find(id);
  if (model == nullptr) return nullptr;
  const std::string wanted = file_label(label);
  for (const auto& each : model->labels) {
    if (each->label() == wanted) return each;
  }
  if (model->labels.size() == kUseLabelsMax) return model->labels.back();
  return model->labels.emplace_back(std::make_shared<LabelUses>(wanted, model->shapes));
}

std::span<const BlockShape> UseCounts::shapes(ModelId id) const {
  const Model* model = find(id);
  return model == nullptr ? std::span<const BlockShape>() : std::span<const BlockShape>(model->shapes);
}

void UseCounts::save(Model& model, std::vector<Saved>* out) {
  if (std::ranges::none_of(model.labels, [](const auto& label) { return label->changed_; })) return;
  Saved saved{.key = model.key, .model = model.name, .lists = {}};
  for (const auto& label : model.labels) {
    label->changed_ = false;
    if (!label->is_empty()) saved.lists.push_back(label->list(model.shapes));
  }
  out->push_back(std::move(saved));
}

std::vector<UseCounts::Saved> UseCounts::take_changed() {
  std::vector<Saved> out = std::exchange(retired_, {});
  for (const auto& [key, model] : models_) save(*model, &out);
  return out;
}

}  // namespace moecached
