// A policy library that answers whatever it likes: an input is its answers. LibraryPolicy must give sound
// ones in their place, and never evict what was not offered.
#include <cmath>
#include <set>
#include <vector>

#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/registry.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

// The C interface has no place for it.
Input* answers = nullptr;

void* create(const moecached_policy_shape*, const char*, char* error, std::size_t error_bytes) {
  static char self = 0;
  if (answers->take<std::uint8_t>() % 8 != 0) return &self;
  const auto text = answers->bytes(answers->take<std::uint16_t>() % (error_bytes + 1));
  std::memcpy(error, text.data(), text.size());  // with or without an end
  return nullptr;
}
void destroy(void*) {}
void on_use(void*, std::uint32_t, std::uint64_t) {}
void on_remove(void*, std::uint32_t) {}

std::size_t rank(void*, const std::uint32_t* candidates, std::size_t n_candidates, std::uint32_t* victims,
                 std::size_t n_victims) {
  for (std::size_t i = 0; i < n_victims; ++i) {
    const auto choice = answers->take<std::uint8_t>();
    victims[i] = choice == 0xff ? answers->take<std::uint32_t>() : candidates[choice % n_candidates];
  }
  return answers->take<std::uint8_t>() % 4 == 0 ? answers->take<std::size_t>() : n_victims;
}
double gain(void*, std::uint32_t, std::uint32_t) { return answers->take<double>(); }

constexpr PolicyShape kShape{.n_experts = 16, .n_slots = 6};

struct Pool {
  EvictionPolicy& policy;
  std::vector<ExpertIndex> resident;
  Step step = 1;

  void insert(ExpertIndex expert) {
    policy.on_miss(expert, step);
    policy.on_insert(expert, step++);
    resident.push_back(expert);
  }

  void evict(std::size_t n_wanted, std::size_t n_offered) {
    const std::vector<ExpertIndex> offered(resident.begin(),
                                           resident.begin() + static_cast<std::ptrdiff_t>(n_offered));
    std::vector<ExpertIndex> victims(n_wanted);
    CHECK(policy.rank(offered, victims) == std::min(n_wanted, n_offered));
    victims.resize(std::min(n_wanted, n_offered));
    std::set<ExpertIndex> distinct;
    for (const ExpertIndex victim : victims) {
      CHECK(std::ranges::find(offered, victim) != offered.end() && distinct.insert(victim).second);
      policy.on_remove(victim);
      std::erase(resident, victim);
    }
  }
};

void run(Input input) {
  answers = &input;
  static constexpr const char* kSpecs[] = {"lib:any", "lib:any:x=1", "lib:any:admit=second-miss",
                                           "lib:any:admit=value"};
  const std::string spec = kSpecs[input.take<std::uint8_t>() % std::size(kSpecs)];
  const moecached_policy_api api{.abi = MOECACHED_POLICY_ABI,
                                 .struct_bytes = sizeof(moecached_policy_api),
                                 .name = "any",
                                 .options = "x",
                                 .create = create,
                                 .destroy = destroy,
                                 .on_insert = on_use,
                                 .on_access = on_use,
                                 .on_miss = on_use,
                                 .on_remove = on_remove,
                                 .rank = rank,
                                 .gain = gain,
                                 .seed = nullptr};
  PolicyLibraries libraries;
  CHECK(libraries.add("any", &api));
  const auto policy = make_policy(spec, kShape, &libraries);
  if (!policy) return check_fault(policy.error());
  Pool pool{.policy = **policy, .resident = {}};
  while (!input.empty()) {
    const auto move = input.take<std::uint8_t>();
    const ExpertIndex expert(move % kShape.n_experts);
    const bool is_resident = std::ranges::find(pool.resident, expert) != pool.resident.end();
    if (is_resident) {
      (*policy)->on_access(expert, pool.step++);
    } else if (pool.resident.size() < kShape.n_slots) {
      pool.insert(expert);
    } else {
      CHECK(!std::isnan((*policy)->gain(expert, pool.resident.front())));
      pool.evict(1 + (move >> 4) % 3, 1 + (move >> 6) % kShape.n_slots);
    }
  }
  CHECK(libraries.find("any")->wrong_answers == 0 || *libraries.find("any")->last_wrong_answer != '\0');
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run(moecached::fuzz::Input({data, size}));
  return 0;
}
