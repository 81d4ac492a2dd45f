// Least recently used: the victim is the expert whose last step is the oldest. The plain yardstick for the
// others; one scan through many experts pushes out everything that is used often. Experts of one step are
// ordered by index.
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

class LruPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "lru";
  // `options`: what follows "lru:" in the spec; it has none.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  explicit LruPolicy(PolicyShape shape);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

 private:
  RecencyList residents_;  // key: last step
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
