// Learns, for each layer while it runs, how likely each expert is used in one of the next four steps, and
// gives up the least likely. A logistic regression over all experts of the layer, resident or not:
//
//     logit(e) = bias + sum_d w_d * log2(rate of e, averaged with decay d) + sum_r pair(r, e)    r: used in
//     this step
//
// Four averages, from the last two steps to the last two hundred, say how often an expert is used; pair() is
// what the experts of this step say about those to come. Four steps after each step its features are compared
// with what was used since: one step of gradient descent (AdaGrad: J. Duchi, E. Hazan, Y. Singer, JMLR 12,
// 2011). Not a neural network and nothing trained beforehand: a policy that has just started ranks by the
// averages.
//
// A step costs some 30 operations an expert. pair() has a weight for every two experts, so layers of more
// than 256 experts, and steps of more than 16, do without it. Thread: core loop. Memory: sized at
// construction, never grows; 256 KiB a layer at most for pairs.
#pragma once

#include <array>
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

class LearnedPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "learned";
  // `options`: what follows "learned:" in the spec; it has none of its own.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  explicit LearnedPolicy(PolicyShape shape);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

  // That the expert is used in one of the next kHorizon steps, as far as this step is known.
  [[nodiscard]] double likelihood(ExpertIndex expert) const noexcept;

  static constexpr std::uint32_t kHorizon = 4;

 private:
  static constexpr std::array<float, 4> kDecays = {0.6F, 0.9F, 0.97F, 0.995F};
  static constexpr std::uint32_t kRates = kDecays.size();
  static constexpr std::uint32_t kStepExpertsMax = 16;
  static constexpr std::uint32_t kPairExpertsMax = 256;

  // Who was used in a step, by index, so that sums do not depend on the order of the reports.
  struct Used {
    Step step = 0;
    std::uint32_t n = 0;  // more than kStepExpertsMax: not listed
    std::array<std::uint32_t, kStepExpertsMax> experts{};
    void add(std::uint32_t expert) noexcept;
    [[nodiscard]] std::span<const std::uint32_t> listed() const noexcept {
      return std::span(experts).first(n <= kStepExpertsMax ? n : 0);
    }
  };
  void use(ExpertIndex expert, Step step) noexcept;
  void end_step() noexcept;  // now_: into the averages and the features of that step
  void learn(const Used& used, std::span<const float> features) noexcept;
  [[nodiscard]] float logit(std::span<const float, kRates> features, std::uint32_t expert,
                            const Used& used) const noexcept;
  [[nodiscard]] std::span<float> features_of(Step step) noexcept;

  const std::uint32_t n_experts_;
  const bool has_pairs_;
  Used now_;
  std::vector<float> rates_;                  // [expert][decay], as of the step before now_
  std::vector<Step> last_step_;               // of use; 0: never
  std::array<float, kRates + 1> weights_{};   // the last one: bias
  std::array<float, kRates + 1> squares_{};   // of the gradients so far
  std::vector<float> pairs_;                  // [used][expert]
  std::array<Used, kHorizon + 1> past_used_;  // ring by step
  std::vector<float> past_features_;          // ring by step: [expert][decay]
  ScoreRanking ranking_;
};

}  // namespace moecached
