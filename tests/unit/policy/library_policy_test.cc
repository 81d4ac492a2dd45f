#include "daemon/policy/library_policy.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace moecached {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Entry = decltype(&moecached_policy_entry);

// Stays loaded.
Entry entry_of(const char* path) {
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  EXPECT_NE(library, nullptr) << ::dlerror();
  return library == nullptr ? nullptr : reinterpret_cast<Entry>(::dlsym(library, MOECACHED_POLICY_ENTRY));
}

class LibraryPolicyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(libraries_.add("liar", entry_of(MOECACHED_LIAR_POLICY)()));
    ASSERT_TRUE(libraries_.add("lru2", entry_of(MOECACHED_EXAMPLE_POLICY)()));
  }
  // Experts 0 to 3 resident, the lowest id used last: what liar and lru choose is opposite.
  std::unique_ptr<EvictionPolicy> made(const std::string& spec) {
    auto policy = make_policy(spec, kShape, &libraries_);
    EXPECT_TRUE(policy) << (policy ? "" : policy.error().text);
    for (std::uint32_t expert = 0; expert < 4; ++expert)
      (*policy)->on_insert(ExpertIndex(expert), 10 - expert);
    return std::move(policy).value();
  }
  static std::vector<std::uint32_t> ranked(EvictionPolicy& policy, std::size_t n) {
    const std::vector<ExpertIndex> candidates = {ExpertIndex(2), ExpertIndex(0), ExpertIndex(3),
                                                 ExpertIndex(1)};
    std::vector<ExpertIndex> victims(n);
    victims.resize(policy.rank(candidates, victims));
    std::vector<std::uint32_t> ids;
    for (const ExpertIndex victim : victims) ids.push_back(victim.value);
    return ids;
  }
  std::string error_of(const std::string& spec) {
    const auto policy = make_policy(spec, kShape, &libraries_);
    return policy ? "no error" : policy.error().text;
  }
  const PolicyLibrary& liar() { return *libraries_.find("liar"); }

  static constexpr PolicyShape kShape{.n_experts = 8, .n_slots = 4};
  PolicyLibraries libraries_;
};

TEST_F(LibraryPolicyTest, AnHonestAnswerIsTaken) {
  const auto policy = made("lib:liar");
  EXPECT_THAT(ranked(*policy, 2), ElementsAre(0, 1));
  EXPECT_EQ(policy->gain(ExpertIndex(6), ExpertIndex(2)), 4);
  EXPECT_EQ(liar().wrong_answers, 0u);
  EXPECT_EQ(policy->name(), "lib:liar");
}

TEST_F(LibraryPolicyTest, AWrongAnswerIsCountedAndLruDecidesInThatCall) {
  std::uint64_t counted = 0;
  for (const auto& [lie, text] :
       std::initializer_list<std::pair<const char*, const char*>>{{"fewer", "another number"},
                                                                  {"more", "another number"},
                                                                  {"foreign", "no candidate"},
                                                                  {"huge", "no candidate"},
                                                                  {"twice", "twice"}}) {
    const auto policy = made(std::string("lib:liar:lie=") + lie);
    EXPECT_THAT(ranked(*policy, 2), ElementsAre(3, 2)) << lie;
    EXPECT_EQ(liar().wrong_answers, ++counted);
    EXPECT_THAT(liar().last_wrong_answer, HasSubstr(text));
    policy->on_access(ExpertIndex(3), 20);  // its own order is kept up to date
    EXPECT_THAT(ranked(*policy, 2), ElementsAre(2, 1)) << lie;
    EXPECT_EQ(liar().wrong_answers, ++counted);
  }
}

TEST_F(LibraryPolicyTest, AGainThatIsNoNumberIsCounted) {
  const auto policy = made("lib:liar:lie=nan");
  EXPECT_EQ(policy->gain(ExpertIndex(6), ExpertIndex(2)), 1);
  EXPECT_EQ(liar().wrong_answers, 1u);
}

TEST_F(LibraryPolicyTest, ACreateThatRefusesSaysWhy) {
  EXPECT_EQ(error_of("lib:liar:lie=none"),
            "policy lib:liar refuses 'lie=none': it knows no such lie; it has lie");
  EXPECT_EQ(error_of("lib:liar:lie=silent"), "policy lib:liar refuses 'lie=silent'; it has lie");
  EXPECT_THAT(error_of("lib:lru2:period=1001"), HasSubstr("period must be a whole number from 0 to 1000"));
}

TEST_F(LibraryPolicyTest, ARefusalThatIsNoTextIsMadeOne) {
  EXPECT_EQ(error_of("lib:liar:lie=noise"),
            "policy lib:liar refuses 'lie=noise': " + std::string(255, '?') + "; it has lie");
}

TEST_F(LibraryPolicyTest, AdmissionStandsBeforeItAndItsOptionIsNotSeenByIt) {
  EXPECT_EQ(error_of("LIB:lru2:admit=second-miss,period=3"), "no error");
  EXPECT_THAT(error_of("lib:lru2:admit=never"), HasSubstr("policy lib:lru2: admit=never is not one of"));
  EXPECT_THAT(error_of("lib:lru2:period"), HasSubstr("is not KEY=VALUE"));
}

TEST_F(LibraryPolicyTest, NamesThatCouldLeaveTheDirectoryAreRefused) {
  for (const char* spec : {"lib", "lib:", "lib:../x", "lib:/x", "lib:a/b", "lib:.x", "lib:1x", "lib:a b"})
    EXPECT_THAT(error_of(spec), HasSubstr("is no name of a policy library")) << spec;
  EXPECT_THAT(error_of(std::string("lib:").append(65, 'x')), HasSubstr("at most 64"));
  EXPECT_THAT(error_of("lib:absent"), HasSubstr("the policy library absent is not loaded"));
}

TEST_F(LibraryPolicyTest, AnotherVersionOrHalfATableIsRefused) {
  const auto refused = [&](const moecached_policy_api* api) {
    const Status added = libraries_.add("x", api);
    EXPECT_EQ(libraries_.find("x"), nullptr);
    return added ? std::string("no error") : added.error().text;
  };
  EXPECT_THAT(refused(entry_of(MOECACHED_OTHER_VERSION_POLICY)()), HasSubstr("is made for version 7"));
  EXPECT_THAT(refused(nullptr), HasSubstr("no table"));
  moecached_policy_api api = *entry_of(MOECACHED_EXAMPLE_POLICY)();
  api.struct_bytes -= 8;
  EXPECT_THAT(refused(&api), HasSubstr("bytes, it must have"));
  api.struct_bytes += 8;
  api.rank = nullptr;
  EXPECT_THAT(refused(&api), HasSubstr("leaves out rank"));
}

TEST_F(LibraryPolicyTest, ThereIsALimitOfLibraries) {
  const moecached_policy_api* const api = entry_of(MOECACHED_EXAMPLE_POLICY)();
  for (std::size_t i = libraries_.all().size(); i < PolicyLibraries::kMax; ++i)
    EXPECT_TRUE(libraries_.add(std::string("n").append(std::to_string(i)), api));
  EXPECT_TRUE(libraries_.add("liar", api)) << "it is there";
  EXPECT_EQ(libraries_.add("more", api).error().code, FaultCode::kLimit);
}

TEST_F(LibraryPolicyTest, WithoutALibraryASpecIsCheckedAsFarAsItGoes) {
  EXPECT_TRUE(check_policy("lib:anything:key=1,admit=value"));
  EXPECT_FALSE(check_policy("lib:any/thing"));
  EXPECT_FALSE(check_policy("lib:anything:admit=never"));
  EXPECT_FALSE(check_policy("best"));
}

// The example itself: the last use but one decides, and what was seen before it took over.
TEST_F(LibraryPolicyTest, TheExampleKeepsWhatWasUsedTwiceLately) {
  const auto policy = made("lib:lru2");
  policy->on_access(ExpertIndex(1), 20);
  policy->on_access(ExpertIndex(3), 21);
  policy->on_access(ExpertIndex(0), 20);
  EXPECT_THAT(ranked(*policy, 4), ElementsAre(2, 3, 1, 0)) << "last but one: never, 7, 9, 10";
  policy->on_miss(ExpertIndex(6), 22);
  EXPECT_LT(policy->gain(ExpertIndex(6), ExpertIndex(0)), 0);
  policy->on_miss(ExpertIndex(6), 23);
  EXPECT_GT(policy->gain(ExpertIndex(6), ExpertIndex(0)), 0);
}

TEST_F(LibraryPolicyTest, TheExampleStartsFromThePast) {
  auto made = make_policy("lib:lru2", kShape, &libraries_);
  ASSERT_TRUE(made);
  std::vector<PastUse> past(kShape.n_experts);
  for (std::uint32_t expert = 0; expert < 4; ++expert)
    past[expert] = {.uses_per_step = 0.1 * (4 - expert), .last_step = 90};
  (*made)->seed(past, 100);
  for (std::uint32_t expert = 0; expert < 4; ++expert) (*made)->on_insert(ExpertIndex(expert), 80);
  EXPECT_THAT(ranked(**made, 4), ElementsAre(3, 2, 1, 0));
}

}  // namespace
}  // namespace moecached
