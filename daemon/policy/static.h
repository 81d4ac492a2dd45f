// A fixed hot list: experts are ranked by scores that do not change any more, so once the best are resident
// nothing moves. The scores are those of seed() (a hot list, or what the policy before has learnt); without
// them, each expert's share of the first steps (`learn=256`), after which no use is counted. What one
// workload taught fits another one badly: the yardstick for what adapting is worth. Which experts are hot is
// a matter of each layer, so no option of the spec, which is one for all layers, could name them.
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

class StaticPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "static";
  // `options`: "learn=256", in steps, 1 to 1,000,000: how long it learns when nothing was seeded.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  StaticPolicy(PolicyShape shape, std::uint32_t learn_steps);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

  [[nodiscard]] bool is_learning() const noexcept { return n_learnt_ < learn_steps_; }

 private:
  struct Score {
    double value = 0;  // uses; while learning a count, then as seeded
    Step counted = 0;
  };
  void use(ExpertIndex expert, Step step) noexcept;

  const std::uint32_t learn_steps_;
  std::uint32_t n_learnt_ = 0;  // steps
  Step now_ = 0;
  std::vector<Score> scores_;
  ScoreRanking ranking_;
};

}  // namespace moecached
