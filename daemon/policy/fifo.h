// First in, first out: the victim is the expert that became resident first; use changes nothing. The
// yardstick below LRU: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
// Systems Journal 5(2), 1966. Experts of one step are ordered by index.
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

class FifoPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "fifo";
  // `options`: what follows "fifo:" in the spec; it has none of its own.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  explicit FifoPolicy(PolicyShape shape);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

 private:
  RecencyList residents_;  // key: the step of the insertion
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
