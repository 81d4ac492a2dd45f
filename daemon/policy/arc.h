// ARC, adaptive replacement cache: experts used once since they came are in `recent`, those used again in
// `frequent`; the names of what either lost are kept. A miss whose name is known says which of the two should
// have been larger, and moves the target of `recent` that way.
//
//     names [recent lost]  <-- [oldest  recent  newest]   [newest  frequent  oldest] -->  [frequent lost]
//     names
//           miss here: target up                 used again ->                      miss here: target down
//
// Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. What
// differs here: experts of one step count as simultaneous: each moves the target by what the names were when
// the step began, and names are dropped between steps.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/recency_list.h"
#include "daemon/policy/registry.h"

namespace moecached {

class ArcPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "arc";
  // `options`: what follows "arc:" in the spec; it has none of its own.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  explicit ArcPolicy(PolicyShape shape);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void set_slots(std::uint32_t n_slots) noexcept override { n_slots_ = n_slots; }
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

  [[nodiscard]] double target() const noexcept;  // slots of `recent`, 0..n_slots

 private:
  void begin(Step step) noexcept;
  void learn(ExpertIndex expert, Step step) noexcept;  // from a miss

  std::uint32_t n_slots_;
  Step now_ = 0;
  double target_ = 0;                               // when this step began
  double shift_ = 0;                                // by this step's misses
  bool has_frequent_miss_ = false;                  // of a name that `frequent` lost, in this step
  double n_recent_lost_ = 0, n_frequent_lost_ = 0;  // when this step began
  RecencyList recent_, frequent_;                   // key: last step
  RecencyList recent_lost_, frequent_lost_;         // key: the step of the eviction
  std::vector<Step> last_step_;
  std::vector<Step> learnt_;  // 1 + the step of the miss that moved the target last
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
