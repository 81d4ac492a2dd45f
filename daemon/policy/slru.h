// Segmented LRU: an expert enters the probation segment and moves to the protected one when it is used again;
// victims come from probation first. A scan passes through probation and leaves the protected experts alone.
//
//            insert                     used again
//   victims <- [oldest  probation  newest] -> [oldest  protected  newest]
//                                  ^ the oldest, when protected is over its share |
//
// Source: R. Karedla, J. S. Love, B. G. Wherry, "Caching strategies to improve disk system performance", IEEE
// Computer 27(3), March 1994. What differs here: experts of one step count as simultaneous and are ordered by
// index, and probation is whatever is not protected, so that leases can keep more in it than its share.
//
// admit=second-miss: an expert read for the first time goes to the eviction end of probation and is noted in
// a ghost list of n_slots names; only one that is read again while noted enters at the newest end. The ghost
// list is that of T. Johnson, D. Shasha, "2Q: a low overhead high performance buffer management replacement
// algorithm", VLDB 1994.
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

struct SlruOptions {
  std::uint32_t probation_percent = 20;  // of the slots, 1..100, at least one slot; the rest is protected
  bool admit_on_second_miss = false;
};

class SlruPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "slru";
  // `options`: what follows "slru:" in the spec: probation=PERCENT, admit=always|second-miss.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  SlruPolicy(PolicyShape shape, SlruOptions options);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

  [[nodiscard]] std::uint32_t protected_slots() const noexcept {
    return protected_slots_;
  }  // its share, a maximum

 private:
  [[nodiscard]] bool admit_as_hot(ExpertIndex expert, Step step) noexcept;

  bool admit_on_second_miss_;
  std::uint32_t protected_slots_;
  std::uint32_t ghost_slots_;
  Step ghost_step_ = 0;
  RecencyList probation_;  // key: the step in which it entered; -1 - step for those put at the eviction end
  RecencyList protected_;  // key: last step
  RecencyList ghosts_;     // key: the step of the first read
  std::vector<Step> last_step_;
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
