// What the tests of policies share: short lists of experts, a policy's ranking of them, and runs in which a
// policy decides what stays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "daemon/policy/eviction_policy.h"

namespace moecached::testing_policies {

using Experts = std::vector<ExpertIndex>;

inline Experts experts(std::initializer_list<std::uint32_t> values) {
  Experts out;
  for (std::uint32_t value : values) out.emplace_back(value);
  return out;
}

inline Experts ranked(EvictionPolicy& policy, const Experts& candidates, std::size_t n) {
  Experts out(n);
  out.resize(policy.rank(candidates, out));
  return out;
}

inline bool contains(const Experts& list, ExpertIndex expert) {
  return std::find(list.begin(), list.end(), expert) != list.end();
}

// A cache of which a policy is the brain; steps are sets of experts, looked up together and then updated.
class Replay {
 public:
  Replay(EvictionPolicy& policy, std::uint32_t n_slots) : policy_(policy), n_slots_(n_slots) {}

  // Returns how many hit.
  std::size_t step(const Experts& set) {
    ++step_;
    Experts missing, candidates;
    for (ExpertIndex expert : set) {
      if (contains(residents_, expert)) {
        policy_.on_access(expert, step_);
      } else {
        policy_.on_miss(expert, step_);
        missing.push_back(expert);
      }
    }
    for (ExpertIndex expert : residents_) {
      if (!contains(set, expert)) candidates.push_back(expert);
    }
    const std::size_t n_free = n_slots_ - residents_.size();
    victims_ = ranked(policy_, candidates, missing.size() - std::min(n_free, missing.size()));
    for (ExpertIndex victim : victims_) {
      policy_.on_remove(victim);
      std::erase(residents_, victim);
    }
    for (ExpertIndex expert : missing) {
      policy_.on_insert(expert, step_);
      residents_.push_back(expert);
    }
    return set.size() - missing.size();
  }
  [[nodiscard]] const Experts& victims() const { return victims_; }  // of the last step
  [[nodiscard]] const Experts& residents() const { return residents_; }

 private:
  EvictionPolicy& policy_;
  std::uint32_t n_slots_;
  Step step_ = 0;
  Experts residents_, victims_;
};

}  // namespace moecached::testing_policies
