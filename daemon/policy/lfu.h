// Least frequently used: the victim has the fewest uses. Uses of absent experts count as well ("perfect" LFU:
// nothing is forgotten by a removal); each expert counts once per step. With halve=N all counts are halved
// every N steps, so that old popularity fades. Counting with aging goes back to J. T. Robinson, M. V.
// Devarakonda, "Data Cache Management Using Frequency-Based Replacement", SIGMETRICS 1990. A promotion gains
// the difference of the counts, per step that they were counted over. Ties: the older use, then the lower
// index.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/registry.h"
#include "daemon/policy/score_ranking.h"

namespace moecached {

class LfuPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "lfu";
  // `options`: "halve=64", in steps, 1 to 1,000,000; without it nothing fades.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  // halve_every 0: never.
  LfuPolicy(PolicyShape shape, std::uint32_t halve_every);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

  [[nodiscard]] double count(ExpertIndex expert) const noexcept { return uses_[expert.value].count; }

 private:
  struct Use {
    double count = 0;
    Step counted = 0;  // what is not newer than this is in the count
    Step last_step = 0;
  };
  void use(ExpertIndex expert, Step step) noexcept;
  void advance(Step step) noexcept;

  const std::uint32_t halve_every_;
  Step now_ = 0;
  double weight_ = 0;  // of the steps seen: the largest count possible
  std::vector<Use> uses_;
  ScoreRanking ranking_;
};

}  // namespace moecached
