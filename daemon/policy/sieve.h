// SIEVE: experts stand in the order of their insertion, a use only marks them, and a hand moves from the
// oldest to the newest and round again: it takes the mark of those it passes, and evicts the first that has
// none.
//
//     oldest [ 4  9* 2  7* 1 ] newest        * used since inserted, or since the hand passed
//               ^ hand: takes 9's mark, evicts 2, stays behind it
//
// Source: Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi, "SIEVE is Simpler than LRU: an Efficient
// Turn-Key Eviction Algorithm for Web Caches", NSDI 2024. What differs here: experts of one step count as
// simultaneous and stand in the order of their index, the hand takes no mark of the current step, and it
// moves when a victim is removed, not when one is asked for.
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

class SievePolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "sieve";
  // `options`: what follows "sieve:" in the spec; it has none of its own.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  explicit SievePolicy(PolicyShape shape);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

 private:
  static constexpr Step kNoMark = 0;
  [[nodiscard]] ExpertIndex from_hand() const noexcept {
    return hand_ == RecencyList::kEnd ? queue_.first() : hand_;
  }
  [[nodiscard]] ExpertIndex round(ExpertIndex expert) const noexcept {
    const ExpertIndex next = queue_.next(expert);
    return next == RecencyList::kEnd ? queue_.first() : next;
  }

  RecencyList queue_;                     // key: the step of the insertion
  ExpertIndex hand_ = RecencyList::kEnd;  // the next it looks at; kEnd: the oldest
  Step now_ = 0;
  std::vector<Step> inserted_;  // step
  std::vector<Step> mark_;      // 1 + the step of the last use since the hand passed; kNoMark
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
