// How many uses of a layer's experts so many slots would serve, for every number of slots at once. Places are
// those of a stack: an expert at place r (from 0) would be resident in a pool of r + 1 slots or more, and in
// none smaller. So the uses counted by place are the slope of the hit curve: what one slot more would have
// served, and one fewer.
//
// The pool that is counted is one that loads every miss and evicts by score: average use, older steps fading
// (the ewma policy). Neighbouring sizes of it contain each other, so one pass knows them all: R. Mattson, J.
// Gecsei, D. Slutz, I. Traiger, "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2),
// 1970, section on priority algorithms. What differs here: the experts of one step come together, and none of
// them makes room for another. It is not the policy in force, whose other sizes nobody could tell without
// running them; which layer is in need differs little between policies. An order by score alone does not
// serve: it takes no account of the slots that newcomers pass through, and finds gains where there are none.
//
// Pure. Thread: one. Memory: 44 bytes an expert, sized at construction. Time: see slot_trader.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/ids.h"

namespace moecached {

class HitCurve {
 public:
  explicit HitCurve(std::uint32_t n_experts);

  // One step: these distinct experts were used together.
  void use(std::span<const ExpertIndex> experts) noexcept;

  // Uses per step that fell on places [first, last), newer steps weighing more.
  [[nodiscard]] double uses(std::uint32_t first, std::uint32_t last) const noexcept;
  // How many steps those are an average of: all at first, towards kMemory later.
  [[nodiscard]] double steps() const noexcept { return weight_ / step_weight_; }
  [[nodiscard]] std::uint32_t n_experts() const noexcept {
    return static_cast<std::uint32_t>(scores_.size());
  }

  static constexpr double kMemory = 4096;    // steps until a step weighs 1/e
  static constexpr double kUseDecay = 0.97;  // of a score, each step: as the ewma policy's default

 private:
  struct Entry {
    double score = 0;  // infinite during the step that uses it
    std::uint32_t expert = 0;
  };
  void raise(std::uint32_t expert) noexcept;
  void rescale() noexcept;

  // Weights grow instead of sums being faded, which would touch all of them each step.
  double use_weight_ = 1, step_weight_ = 1, weight_ = 0;
  std::vector<double> scores_;         // by expert
  std::vector<double> uses_;           // by place
  std::vector<Entry> stack_;           // by place
  std::vector<std::uint32_t> places_;  // by expert
};

}  // namespace moecached
