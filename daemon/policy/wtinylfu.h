// W-TinyLFU: a small window takes every newcomer; when it is full, its oldest expert contends with the victim
// of the main segment, and the one that was used less goes. The main segment is a segmented LRU: probation,
// and protected for those used there again.
//
//     insert -> [newest window oldest] --- contends with ---> [oldest probation newest] -> [protected]
//                                      the winner is in probation, the loser goes
//
// Source: G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM
// Transactions on Storage 13(4), 2017. What differs here: a layer has few experts, so their uses are counted
// exactly, up to 15 as in the paper, where it sketches them; all are halved after ten uses per slot, as in
// the paper. Experts of one step count as simultaneous. The paper's window of 1 % would be no slot at all:
// `window` percent, at least one slot.
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

class WTinyLfuPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "wtinylfu";
  // `options`: "window=10", percent of the slots, 1 to 90; what is left is the main segment, a fifth of it
  // probation.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  WTinyLfuPolicy(PolicyShape shape, std::uint32_t window_percent);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  void set_slots(std::uint32_t n_slots) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  // The difference of the counts, per step that they were counted over.
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

  [[nodiscard]] std::uint32_t count(ExpertIndex expert) const noexcept { return counts_[expert.value].uses; }

 private:
  static constexpr std::uint8_t kCountMax = 15;
  struct Count {
    std::uint8_t uses = 0;
    Step last_step = 0;
  };
  void begin(Step step) noexcept;
  void use(ExpertIndex expert, Step step) noexcept;
  void move_on(ExpertIndex expert) noexcept;  // from the window to probation
  [[nodiscard]] std::uint32_t main_size() const noexcept { return probation_.size() + protected_.size(); }

  std::uint32_t window_percent_;
  std::uint32_t main_slots_ = 0, protected_slots_ = 0, window_slots_ = 0;
  std::uint64_t n_uses_until_halved_ = 0;
  std::uint64_t n_uses_ = 0;
  double n_steps_ = 0;  // counted over, halved with the counts
  Step now_ = 0;
  RecencyList window_, probation_, protected_;  // key: last step, of probation the step in which it entered
  std::vector<Count> counts_;
  std::vector<Step> placed_;  // step of the insertion, or the last use
  std::vector<std::uint8_t> marks_;
};

}  // namespace moecached
