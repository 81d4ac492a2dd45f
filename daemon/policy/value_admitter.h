// Admits what is expected to save more time than it costs. With p the use of an expert per step (an average
// of its own, use_rates.h), one in place of another saves (p_newcomer - p_victim) * miss_ns each step, for as
// long as it is expected to stay. Its upload costs upload_ns of the link, but only as far as the link is busy
// with misses that wait behind it:
//
//     admitted when  (p_newcomer - p_victim) * miss_ns * stay  >  upload_ns * link_busy
//     stay = n_slots / insertions per step, at most the steps that the averages look back
//
// Where every miss has to be loaded the upload is paid for anyway. There a newcomer that took somebody's
// place is admitted when its p is above the lowest of those that stayed. Thread: core loop. Memory: sized at
// construction, never grows.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/policy/admitter.h"
#include "daemon/policy/registry.h"
#include "daemon/policy/use_rates.h"

namespace moecached {

class ValueAdmitter final : public Admitter {
 public:
  static constexpr double kDecay = 0.97;  // as the ewma policy

  explicit ValueAdmitter(PolicyShape shape);

  void on_miss(ExpertIndex expert, Step step) noexcept override { rates_.use(expert, step); }
  void on_access(ExpertIndex expert, Step step) noexcept override { rates_.use(expert, step); }
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override { rates_.seed(past, now); }
  void set_costs(const PolicyCosts& costs) noexcept override { costs_ = costs; }
  void set_slots(std::uint32_t n_slots) noexcept override;
  [[nodiscard]] bool admits(ExpertIndex newcomer, Step step) noexcept override;
  [[nodiscard]] bool admits_guest(ExpertIndex guest) noexcept override;
  [[nodiscard]] bool is_worth(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

  [[nodiscard]] double stay_steps() const noexcept;
  [[nodiscard]] double gain_min() const noexcept;  // uses per step that an upload has to gain

 private:
  [[nodiscard]] bool is_above_the_lowest(ExpertIndex expert) const noexcept;

  std::uint32_t n_slots_;
  PolicyCosts costs_;
  UseRates rates_;
  std::vector<Step> admitted_;  // 1 + the step in which it was; 0: is not
  std::uint32_t n_freed_ = 0;   // places that were somebody's and are not filled again yet
  Step insert_step_ = 0;
  bool is_contested_ = false;  // the insertions of insert_step_
  double inserts_ = 0;         // per step, averaged as of insert_step_
};

}  // namespace moecached
