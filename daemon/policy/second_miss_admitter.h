// Admits an expert that is missed again while its name is noted. Every miss notes the name; the n_slots names
// whose misses are the newest are kept; an admission uses the name up. The note is that of T. Johnson, D.
// Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994. Thread:
// core loop. Memory: sized at construction, never grows.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/policy/admitter.h"
#include "daemon/policy/recency_list.h"
#include "daemon/policy/registry.h"

namespace moecached {

class SecondMissAdmitter final : public Admitter {
 public:
  explicit SecondMissAdmitter(PolicyShape shape);

  void on_miss(ExpertIndex expert, Step step) noexcept override { note(expert, step); }
  void set_slots(std::uint32_t n_slots) noexcept override { n_names_ = n_slots; }
  [[nodiscard]] bool admits(ExpertIndex newcomer, Step step) noexcept override;
  [[nodiscard]] bool admits_guest(ExpertIndex /*guest*/) noexcept override { return true; }
  [[nodiscard]] bool is_worth(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

 private:
  void note(ExpertIndex expert, Step step) noexcept;

  std::uint32_t n_names_;
  Step now_ = 0;
  RecencyList names_;             // key: the step of the last miss
  std::vector<Step> first_miss_;  // of those that are noted
  std::vector<Step> last_miss_;
};

}  // namespace moecached
