// What every eviction policy must do. A new policy joins by its line in daemon/policy/registry.cc; variants
// that only differ in options are listed below.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/registry.h"

namespace moecached {
namespace {

// The example of a policy library. Stays loaded.
const PolicyLibraries& libraries() {
  static const PolicyLibraries loaded = [] {
    PolicyLibraries out;
    void* const library = ::dlopen(MOECACHED_EXAMPLE_POLICY, RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(library, nullptr) << ::dlerror();
    if (library == nullptr) return out;
    using Entry = decltype(&moecached_policy_entry);
    const auto entry = reinterpret_cast<Entry>(::dlsym(library, MOECACHED_POLICY_ENTRY));
    EXPECT_TRUE(entry != nullptr && out.add("lru2", entry()));
    return out;
  }();
  return loaded;
}

std::vector<std::string> specs() {
  std::vector<std::string> all(policy_names().begin(), policy_names().end());
  all.insert(all.end(), {"ewma:decay=500", "ewma:decay=999", "lfu:halve=1", "lfu:halve=64", "s3fifo:small=1",
                         "s3fifo:small=50", "slru:probation=50", "slru:probation=100", "static:learn=20",
                         "wtinylfu:window=1", "wtinylfu:window=50", "lib:lru2", "lib:lru2:period=7",
                         "lib:lru2:admit=second-miss", "lib:lru2:admit=value,period=2"});
  for (std::string_view name : policy_names()) {
    all.push_back(std::string(name) + ":admit=second-miss");
    all.push_back(std::string(name) + ":admit=value");
  }
  return all;
}

// A policy behind a model of what is resident, which checks every answer of rank().
class CheckedPolicy {
 public:
  CheckedPolicy(const std::string& spec, PolicyShape shape) : shape_(shape) {
    auto made = make_policy(spec, shape, &libraries());
    EXPECT_TRUE(made) << spec;
    policy_ = std::move(made).value();
  }

  ~CheckedPolicy() {
    for (const auto& library : libraries().all())
      EXPECT_EQ(library->wrong_answers, 0u) << library->last_wrong_answer;
  }
  CheckedPolicy(const CheckedPolicy&) = delete;
  CheckedPolicy& operator=(const CheckedPolicy&) = delete;

  [[nodiscard]] const std::set<ExpertIndex>& residents() const { return residents_; }
  [[nodiscard]] bool is_full() const { return residents_.size() == shape_.n_slots; }

  // REQUIRES: no more are resident.
  void set_slots(std::uint32_t n_slots) {
    ASSERT_LE(residents_.size(), n_slots);
    shape_.n_slots = n_slots;
    policy_->set_slots(n_slots);
  }
  [[nodiscard]] std::uint32_t n_slots() const { return shape_.n_slots; }
  void insert(ExpertIndex expert, Step step) {
    ASSERT_FALSE(is_full());
    ASSERT_TRUE(residents_.insert(expert).second);
    policy_->on_insert(expert, step);
  }
  void access(ExpertIndex expert, Step step) { policy_->on_access(expert, step); }
  void miss(ExpertIndex expert, Step step) { policy_->on_miss(expert, step); }
  void remove(ExpertIndex expert) {
    ASSERT_EQ(residents_.erase(expert), 1u);
    policy_->on_remove(expert);
  }
  [[nodiscard]] std::vector<ExpertIndex> rank(const std::vector<ExpertIndex>& candidates, std::size_t n) {
    // One more place than asked for, to see a write behind the end.
    std::vector<ExpertIndex> out(n + 1, ExpertIndex(kUntouched));
    const std::size_t written = policy_->rank(candidates, std::span(out).first(n));
    EXPECT_EQ(written, std::min(n, candidates.size()));
    EXPECT_EQ(out[n].value, kUntouched);
    out.resize(std::min(written, n));
    std::set<ExpertIndex> seen;
    for (ExpertIndex victim : out) {
      EXPECT_NE(std::find(candidates.begin(), candidates.end(), victim), candidates.end()) << victim.value;
      EXPECT_TRUE(seen.insert(victim).second) << victim.value << " twice";
    }
    return out;
  }

 private:
  static constexpr std::uint32_t kUntouched = 0xdead;
  PolicyShape shape_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::set<ExpertIndex> residents_;
};

struct RunOptions {
  PolicyShape shape;
  std::uint32_t seed = 1;
  int steps = 2000;
  bool reverse_each_step = false;  // report the experts of a step in the opposite order
  bool trades_slots = false;       // the layer's slots become more and fewer
};

// A random life: sets of experts are used, missing ones inserted, victims taken as the policy ranks them,
// some removed for other reasons. Returns every victim in order. The random numbers depend on the policy's
// answers alone.
std::vector<std::uint32_t> run(const std::string& spec, RunOptions options) {
  CheckedPolicy policy(spec, options.shape);
  std::mt19937 random(options.seed);
  const auto below = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
  std::vector<std::uint32_t> victims_seen;
  for (int i = 1; i <= options.steps; ++i) {
    const Step step = static_cast<Step>(i);
    if (options.trades_slots && below(8) == 0) {
      const std::uint32_t n_slots = 1 + below(options.shape.n_slots);
      const std::vector<ExpertIndex> all(policy.residents().begin(), policy.residents().end());
      for (ExpertIndex victim : policy.rank(all, all.size() - std::min<std::size_t>(n_slots, all.size()))) {
        policy.remove(victim);
        victims_seen.push_back(victim.value);
      }
      policy.set_slots(n_slots);
    }
    std::set<ExpertIndex> wanted;
    const std::uint32_t n_wanted = 1 + below(std::min(policy.n_slots(), 6u));
    while (wanted.size() < n_wanted) {
      wanted.insert(ExpertIndex(std::min(below(options.shape.n_experts), below(options.shape.n_experts))));
    }
    std::vector<ExpertIndex> used, missing, candidates;
    for (ExpertIndex expert : wanted)
      (policy.residents().contains(expert) ? used : missing).push_back(expert);
    for (ExpertIndex expert : policy.residents()) {
      if (!wanted.contains(expert)) candidates.push_back(expert);
    }
    std::shuffle(candidates.begin(), candidates.end(), random);
    if (options.reverse_each_step) {
      std::reverse(used.begin(), used.end());
      std::reverse(missing.begin(), missing.end());
    }
    for (ExpertIndex expert : missing) policy.miss(expert, step);
    for (ExpertIndex expert : used) policy.access(expert, step);
    const std::size_t n_free = policy.n_slots() - policy.residents().size();
    const std::size_t n_victims = missing.size() - std::min(n_free, missing.size());
    (void)policy.rank(candidates,
                      below(candidates.size() + 2));  // asking alone changes nothing that must agree
    for (ExpertIndex victim : policy.rank(candidates, n_victims)) {
      policy.remove(victim);
      victims_seen.push_back(victim.value);
    }
    for (ExpertIndex expert : missing) policy.insert(expert, step);
    if (below(20) == 0 && !policy.residents().empty()) {
      auto out = policy.residents().begin();
      std::advance(out, below(policy.residents().size()));
      policy.remove(*out);
    }
    if (::testing::Test::HasFailure()) return victims_seen;
  }
  return victims_seen;
}

class EvictionPolicyConformance : public ::testing::TestWithParam<std::string> {};

TEST_P(EvictionPolicyConformance, RanksOnlyCandidatesEachOnceAndAsManyAsFit) {
  CheckedPolicy policy(GetParam(), {.n_experts = 16, .n_slots = 8});
  for (std::uint32_t value = 0; value < 8; ++value) policy.insert(ExpertIndex(value * 2), 1 + value / 3);
  const std::vector<ExpertIndex> candidates = {ExpertIndex(14), ExpertIndex(2), ExpertIndex(8)};
  for (std::size_t n = 0; n <= 6; ++n)
    EXPECT_EQ(policy.rank(candidates, n).size(), std::min<std::size_t>(n, 3));
  EXPECT_TRUE(policy.rank({}, 4).empty());
}

TEST_P(EvictionPolicyConformance, AShorterAnswerIsTheBeginningOfALongerOne) {
  CheckedPolicy policy(GetParam(), {.n_experts = 16, .n_slots = 8});
  for (std::uint32_t value = 0; value < 8; ++value) policy.insert(ExpertIndex(value), value);
  for (std::uint32_t value = 0; value < 8; value += 3) policy.access(ExpertIndex(value), 20 + value);
  const std::vector<ExpertIndex> candidates(policy.residents().begin(), policy.residents().end());
  const auto all = policy.rank(candidates, 8);
  for (std::size_t n = 0; n < 8; ++n) {
    EXPECT_EQ(policy.rank(candidates, n),
              std::vector<ExpertIndex>(all.begin(), all.begin() + static_cast<long>(n)));
  }
}

TEST_P(EvictionPolicyConformance, SurvivesALongRandomRun) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    const auto victims = run(GetParam(), {.shape = {.n_experts = 40, .n_slots = 12}, .seed = seed});
    EXPECT_GT(victims.size(), 1000u) << "the run evicted too little to show anything";
  }
}

TEST_P(EvictionPolicyConformance, FollowsALayerThatTradesSlots) {
  for (std::uint32_t seed = 1; seed <= 5; ++seed) {
    RunOptions options{.shape = {.n_experts = 40, .n_slots = 12}, .seed = seed, .trades_slots = true};
    const auto victims = run(GetParam(), options);
    EXPECT_GT(victims.size(), 1000u);
    EXPECT_EQ(run(GetParam(), options), victims);
    options.reverse_each_step = true;
    EXPECT_EQ(run(GetParam(), options), victims) << "the order within a step matters";
  }
}

TEST_P(EvictionPolicyConformance, WorksWithOneSlot) {
  EXPECT_GT(run(GetParam(), {.shape = {.n_experts = 9, .n_slots = 1}}).size(), 500u);
}

TEST_P(EvictionPolicyConformance, WorksWithOneExpert) {
  EXPECT_TRUE(run(GetParam(), {.shape = {.n_experts = 1, .n_slots = 1}}).empty());
}

TEST_P(EvictionPolicyConformance, WorksWithASlotForEveryExpert) {
  EXPECT_TRUE(run(GetParam(), {.shape = {.n_experts = 24, .n_slots = 24}}).empty());
}

TEST_P(EvictionPolicyConformance, TheSameEventsGiveTheSameVictims) {
  const RunOptions options{.shape = {.n_experts = 40, .n_slots = 12}, .seed = 3};
  EXPECT_EQ(run(GetParam(), options), run(GetParam(), options));
}

TEST_P(EvictionPolicyConformance, OtherEventsGiveOtherVictims) {
  EXPECT_NE(run(GetParam(), {.shape = {.n_experts = 40, .n_slots = 12}, .seed = 3}),
            run(GetParam(), {.shape = {.n_experts = 40, .n_slots = 12}, .seed = 4}));
}

TEST_P(EvictionPolicyConformance, TheOrderWithinAStepDoesNotMatter) {
  RunOptions options{.shape = {.n_experts = 40, .n_slots = 12}, .seed = 5};
  const auto forwards = run(GetParam(), options);
  options.reverse_each_step = true;
  EXPECT_EQ(run(GetParam(), options), forwards);
}

TEST_P(EvictionPolicyConformance, TheOrderOfTheCandidatesDoesNotMatter) {
  CheckedPolicy policy(GetParam(), {.n_experts = 16, .n_slots = 8});
  for (std::uint32_t value = 0; value < 8; ++value) policy.insert(ExpertIndex(value), 1 + value / 4);
  for (std::uint32_t value : {7, 2, 5}) policy.access(ExpertIndex(value), 3);
  std::vector<ExpertIndex> candidates(policy.residents().begin(), policy.residents().end());
  const auto ranked = policy.rank(candidates, 8);
  std::mt19937 random(9);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(candidates.begin(), candidates.end(), random);
    EXPECT_EQ(policy.rank(candidates, 8), ranked);
  }
}

TEST_P(EvictionPolicyConformance, ARemovedExpertComesBackAsANewOne) {
  CheckedPolicy policy(GetParam(), {.n_experts = 6, .n_slots = 3});
  for (Step step = 1; step < 300; ++step) {
    const ExpertIndex expert(static_cast<std::uint32_t>(step % 6));
    if (policy.residents().contains(expert)) policy.remove(expert);
    if (policy.is_full()) policy.remove(*policy.residents().begin());
    policy.insert(expert, step);
    policy.access(expert, step);
    const std::vector<ExpertIndex> candidates(policy.residents().begin(), policy.residents().end());
    ASSERT_EQ(policy.rank(candidates, 3).size(), candidates.size());
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& spec) {
  std::string name = spec.param;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Registered, EvictionPolicyConformance, ::testing::ValuesIn(specs()), test_name);

}  // namespace
}  // namespace moecached
