// Who is let in, apart from who goes: admission around any eviction policy, `admit=` in every spec.
//
//   always        every newcomer is the policy's own (no decorator at all)
//   second-miss   only one whose name is still noted from an earlier miss (second_miss_admitter.h)
//   value         only one that is expected to save more time than its upload costs (value_admitter.h)
//
// Where misses are read in place, not being admitted is a gain() of 0. Where every miss has to be loaded, it
// is a guest: resident, but unknown to the policy and the first to go, the newest guest first. A guest that
// proves itself by a later use is admitted then, and the policy told of its insertion and of the use. Thread:
// core loop. Memory: sized at construction, never grows.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/policy/admitter.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/recency_list.h"
#include "daemon/policy/registry.h"

namespace moecached {

enum class Admission : std::uint8_t { kAlways, kSecondMiss, kValue };

// The options of a spec, parted into admission's own and the policy's.
struct AdmissionSplit {
  Admission admission = Admission::kAlways;
  std::string policy_options;
};
// kInvalid: a value of admit= that there is not, or options that cannot be read.
[[nodiscard]] Result<AdmissionSplit> split_admission(std::string_view policy, std::string_view options);
// `policy` itself for kAlways.
[[nodiscard]] std::unique_ptr<EvictionPolicy> with_admission(Admission admission, PolicyShape shape,
                                                             std::unique_ptr<EvictionPolicy> policy);

class AdmissionPolicy final : public EvictionPolicy {
 public:
  AdmissionPolicy(PolicyShape shape, std::unique_ptr<Admitter> admitter,
                  std::unique_ptr<EvictionPolicy> policy);

  [[nodiscard]] std::string_view name() const noexcept override { return policy_->name(); }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  void set_costs(const PolicyCosts& costs) noexcept override;
  void set_slots(std::uint32_t n_slots) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

 private:
  std::unique_ptr<Admitter> admitter_;
  std::unique_ptr<EvictionPolicy> policy_;
  RecencyList guests_;  // key: -1 - the step of the insertion
  std::vector<Step> inserted_;
  std::vector<std::uint8_t> marks_;
  std::vector<ExpertIndex> known_;  // scratch: the candidates that the policy knows
};

}  // namespace moecached
