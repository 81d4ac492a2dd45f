#include "daemon/ipc/warm_start.h"

#include <spdlog/spdlog.h>

#include <algorithm>

namespace moecached {
namespace {

class Hash {
 public:
  void add(std::string_view text) {
    for (const char c : text) step(static_cast<unsigned char>(c));
    add(text.size());
  }
  void add(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) step(static_cast<unsigned char>(value >> (8 * i)));
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  void step(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001b3u; }
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace

std::uint64_t model_key(const ModelLayout& layout, std::span<const FileIdentity> files) {
  Hash hash;
  hash.add(layout.architecture);
  hash.add(layout.name);
  hash.add(layout.n_expert_used);
  for (const FileIdentity& file : files) hash.add(file.bytes);
  for (const LayerLayout& layer : layout.layers) {
    hash.add(layer.block);
    hash.add(layer.n_experts);
    for (const PartLayout& part : layer.parts) {
      hash.add(part.ggml_type);
      hash.add(part.file);
      hash.add(part.file_offset);
      hash.add(part.expert_bytes);
      for (const PartExtent& extent : part.extents) {
        hash.add(extent.file);
        hash.add(extent.offset);
      }
    }
  }
  return hash.value();
}

std::vector<BlockShape> shapes_of(const ModelLayout& layout) {
  std::vector<BlockShape> shapes;
  for (const LayerLayout& layer : layout.layers)
    shapes.push_back({.block = layer.block, .n_experts = layer.n_experts});
  return shapes;
}

WarmthStore::WarmthStore(const std::string& directory) {
  if (directory.empty() || directory == "none") return;
  auto opened = StateDirectory::open(directory);
  if (opened) {
    directory_ = *std::move(opened);
  } else {
    spdlog::warn("hot lists are not saved: {}; choose another state.directory, or none", opened.error().text);
  }
}

WarmStart WarmthStore::load(const ModelLayout& layout, std::span<const FileIdentity> files) {
  WarmStart start{.key = model_key(layout, files), .lists = {}};
  const std::lock_guard lock(mutex_);
  if (!directory_) return start;
  auto lists = directory_->load(start.key);
  if (!lists) {
    spdlog::warn("a hot list is ignored: {}", lists.error().text);
    return start;
  }
  const std::vector<BlockShape> shapes = shapes_of(layout);
  for (const UseList& list : *lists) {
    auto fitted = fit_to(list, shapes);
    if (fitted) {
      start.lists.push_back(*std::move(fitted));
    } else {
      spdlog::warn("a hot list is ignored: {}: {}", directory_->path_of(start.key), fitted.error().text);
    }
  }
  return start;
}

void WarmthStore::save(std::span<const UseCounts::Saved> models) {
  const std::lock_guard lock(mutex_);
  if (!directory_) return;
  for (const UseCounts::Saved& model : models) {
    if (model.lists.empty()) continue;
    if (Status saved = directory_->save(model.key, model.model, model.lists); !saved)
      spdlog::warn("the hot lists of {} are not saved: {}", model.model, saved.error().text);
  }
}

std::vector<std::vector<double>> rates_of(const UseList& list, std::uint32_t n_expert_used) {
  std::vector<std::vector<double>> out;
  for (const LayerUses& layer : list.layers) {
    double total = 0;
    for (const std::uint64_t count : layer.counts) total += static_cast<double>(count);
    std::vector<double>& rates = out.emplace_back();
    for (const std::uint64_t count : layer.counts)
      rates.push_back(total > 0 ? std::min(1.0, static_cast<double>(count) * n_expert_used / total) : 0);
  }
  return out;
}

PrewarmPlan::PrewarmPlan(const UseList& list, const Brain& brain, ModelId model) {
  std::vector<std::vector<ExpertIndex>> hottest;
  std::size_t longest = 0;
  for (std::uint32_t l = 0; l < list.layers.size(); ++l) {
    const std::vector<std::uint64_t>& counts = list.layers[l].counts;
    std::vector<ExpertIndex>& of_layer = hottest.emplace_back();
    for (std::uint32_t e = 0; e < counts.size(); ++e) {
      if (counts[e] > 0 && brain.is_absent(model, LayerIndex(l), ExpertIndex(e))) of_layer.emplace_back(e);
    }
    std::ranges::stable_sort(of_layer,
                             [&](ExpertIndex a, ExpertIndex b) { return counts[a.value] > counts[b.value]; });
    of_layer.resize(std::min<std::size_t>(of_layer.size(), brain.free_slots(model, LayerIndex(l))));
    longest = std::max(longest, of_layer.size());
  }
  for (std::size_t rank = 0; rank < longest; ++rank) {
    for (std::uint32_t l = 0; l < hottest.size(); ++l) {
      if (rank < hottest[l].size()) steps_.push_back({LayerIndex(l), hottest[l][rank]});
    }
  }
}

}  // namespace moecached
