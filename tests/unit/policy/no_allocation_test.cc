// Counts every allocation of this program, so that "sized at construction" is a fact.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/registry.h"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

// Not inlined: GCC 12 takes the two halves, seen apart, for a mismatched pair (-Wmismatched-new-delete).
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace moecached {
namespace {

TEST(EveryPolicy, AllocatesNothingAfterItsConstruction) {
  constexpr std::uint32_t kExperts = 64, kSlots = 16;
  std::vector<std::string> specs(policy_names().begin(), policy_names().end());
  for (std::string_view name : policy_names()) {
    specs.push_back(std::string(name) + ":admit=second-miss");
    specs.push_back(std::string(name) + ":admit=value");
  }
  // Of a library, what stands before it; what it does itself is its own affair.
  void* const library = ::dlopen(MOECACHED_EXAMPLE_POLICY, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << ::dlerror();
  using Entry = decltype(&moecached_policy_entry);
  PolicyLibraries libraries;
  ASSERT_TRUE(libraries.add("lru2", reinterpret_cast<Entry>(::dlsym(library, MOECACHED_POLICY_ENTRY))()));
  specs.emplace_back("lib:lru2");
  for (const std::string& spec : specs) {
    auto policy = make_policy(spec, {.n_experts = kExperts, .n_slots = kSlots}, &libraries);
    ASSERT_TRUE(policy);
    std::vector<ExpertIndex> candidates(kSlots), victims(1);
    const std::uint64_t before = allocations.load();
    for (std::uint32_t i = 0; i < 1000; ++i) {
      if (i >= kSlots) {
        for (std::uint32_t k = 0; k < kSlots; ++k) candidates[k] = ExpertIndex((i - kSlots + k) % kExperts);
        if ((*policy)->rank(candidates, victims) != 1) std::abort();
        (*policy)->on_remove(candidates[0]);
      }
      (*policy)->on_miss(ExpertIndex(i % kExperts), 2 * i);
      (*policy)->on_insert(ExpertIndex(i % kExperts), 2 * i);
      (*policy)->on_access(ExpertIndex(i % kExperts), 2 * i + 1);
    }
    EXPECT_EQ(allocations.load(), before) << spec;
  }
  const std::uint64_t before = allocations.load();
  specs.emplace_back(100, 'x');
  EXPECT_GT(allocations.load(), before) << "the counter does not count";
}

}  // namespace
}  // namespace moecached
