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
};

class SlruPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "slru";
  // `options`: what follows "slru:" in the spec: probation=PERCENT.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  SlruPolicy(PolicyShape shape, SlruOptions options);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void set_slots(std::uint32_t n_slots) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

  [[nodiscard]] std::uint32_t protected_slots() const noexcept {
    return protected_slots_;
  }  // its share, a maximum

 private:
  SlruOptions options_;
  std::uint32_t protected_slots_;
  RecencyList probation_;  // key: the step in which it entered
  RecencyList protected_;  // key: last step
  std::vector<Step> last_step_;
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
