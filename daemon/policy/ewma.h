// Exponentially weighted moving average of use: score = share of recent steps in which the expert was used,
// each step weighing `decay` times the next. The victim has the lowest score. Absent experts are scored as
// well, so that a promotion can be weighed: it gains the newcomer's score less the victim's, in uses per
// step. The best simple causal policy on the traces this project measures with. The average is the one of S.
// W. Roberts, "Control Chart Tests Based on Geometric Moving Averages", Technometrics 1(3), 1959.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "daemon/base/result.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/registry.h"
#include "daemon/policy/score_ranking.h"
#include "daemon/policy/use_rates.h"

namespace moecached {

class EwmaPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "ewma";
  // `options`: "decay=970", in thousandths, 500 to 999.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  EwmaPolicy(PolicyShape shape, double decay);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

  [[nodiscard]] double score(ExpertIndex expert) const noexcept;  // at the newest step seen

 private:
  UseRates rates_;
  ScoreRanking ranking_;
};

}  // namespace moecached
