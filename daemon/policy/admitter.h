// Says whether a newcomer is worth a place; admission.h acts on it. Thread: core loop. Memory: sized at
// construction, never grows.
#pragma once

#include <span>

#include "daemon/base/ids.h"
#include "daemon/policy/eviction_policy.h"

namespace moecached {

class Admitter {
 public:
  virtual ~Admitter() = default;

  // Events as an eviction policy gets them.
  virtual void on_miss(ExpertIndex expert, Step step) noexcept = 0;
  virtual void on_access(ExpertIndex /*expert*/, Step /*step*/) noexcept {}
  virtual void on_remove(ExpertIndex /*expert*/) noexcept {}
  virtual void seed(std::span<const PastUse> /*past*/, Step /*now*/) noexcept {}
  virtual void set_costs(const PolicyCosts& /*costs*/) noexcept {}
  virtual void set_slots(std::uint32_t /*n_slots*/) noexcept {}

  // The expert has become resident because of `step`: is it the policy's, or a guest?
  [[nodiscard]] virtual bool admits(ExpertIndex newcomer, Step step) noexcept = 0;
  // The guest was used again, of which on_access has been told.
  [[nodiscard]] virtual bool admits_guest(ExpertIndex guest) noexcept = 0;
  // Where nothing needs to be inserted: is the newcomer worth its upload, in the victim's place?
  [[nodiscard]] virtual bool is_worth(ExpertIndex newcomer, ExpertIndex victim) const noexcept = 0;
};

}  // namespace moecached
