// Scratch of policies that rank by a score: lowest score first, then the older use, then the lower index.
// Thread: core loop. Memory: reserved at construction for every expert of a layer, never grows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/policy/eviction_policy.h"

namespace moecached {

class ScoreRanking {
 public:
  explicit ScoreRanking(std::uint32_t n_experts) { ranked_.reserve(n_experts); }

  void clear() noexcept { ranked_.clear(); }
  // REQUIRES: at most one per expert since clear().
  void add(double score, Step last_step, ExpertIndex expert) noexcept {
    ranked_.push_back({score, last_step, expert});
  }
  // Writes the lowest, lowest first, until `out` is full or none is left; returns how many.
  [[nodiscard]] std::size_t write_lowest(std::span<ExpertIndex> out) noexcept {
    const std::size_t n = std::min(ranked_.size(), out.size());
    std::partial_sort(ranked_.begin(), ranked_.begin() + static_cast<std::ptrdiff_t>(n), ranked_.end(),
                      [](const Ranked& a, const Ranked& b) {
                        return std::tie(a.score, a.last_step, a.expert) <
                               std::tie(b.score, b.last_step, b.expert);
                      });
    for (std::size_t i = 0; i < n; ++i) out[i] = ranked_[i].expert;
    return n;
  }

 private:
  struct Ranked {
    double score;
    Step last_step;
    ExpertIndex expert;
  };
  std::vector<Ranked> ranked_;
};

}  // namespace moecached
