// Policies are changed ten thousand times while clients decode: no lookup is lost, nothing that is resident
// goes by a change, and no byte is wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "daemon/policy/registry.h"
#include "tests/integration/client_daemon_fixture.h"

namespace moecached {
namespace {

using ::testing::HasSubstr;

constexpr int kSwaps = 10'000;

std::vector<std::string> all_specs() {
  std::vector<std::string> specs;
  for (const std::string_view name : policy_names()) {
    for (const char* admit : {"always", "second-miss", "value"})
      specs.push_back(std::string(name) + ":admit=" + admit);
  }
  specs.insert(specs.end(), {"lib:lru2", "lib:lru2:period=3", "lib:lru2:admit=second-miss"});
  return specs;
}

struct Sums {
  std::uint64_t lookups = 0, hits = 0, misses = 0, insertions = 0, evictions = 0, resident = 0;
};
Sums sum(const ModelReport& model) {
  Sums sums;
  for (const LayerReport& layer : model.layers) {
    sums.lookups += layer.lookups;
    sums.hits += layer.hits;
    sums.misses += layer.misses;
    sums.insertions += layer.insertions;
    sums.evictions += layer.evictions;
    sums.resident += layer.resident;
  }
  return sums;
}

// With a directory of policy libraries: the example, and those that must not be believed.
class PolicySwapTest : public ClientDaemonTest {
 protected:
  void SetUp() override {
    ClientDaemonTest::SetUp();
    policies_ = folder_ / "policies";
    std::filesystem::create_directory(policies_);
    using std::filesystem::perms;
    std::filesystem::permissions(policies_, perms::owner_all | perms::group_read | perms::group_exec);
    for (const char* library : {MOECACHED_EXAMPLE_POLICY, MOECACHED_LIAR_POLICY,
                                MOECACHED_OTHER_VERSION_POLICY, MOECACHED_NO_ENTRY_POLICY}) {
      const std::filesystem::path from = library, to = policies_ / from.filename();
      std::filesystem::copy_file(from, to);
      std::filesystem::permissions(to, perms::owner_read | perms::owner_write | perms::group_read);
    }
    policy_directory_ = policies_;
    restart();
  }
  void restart() {
    daemon_.reset();
    start({.kind = SlotsSpec::Kind::kCount, .value = 6});
  }
  std::string error_of(const std::string& spec) {
    const auto set = daemon_->set_policy({}, spec);
    return set ? "no error" : set.error().text;
  }
  std::filesystem::path policies_;
};

// Three distinct experts a layer and two lanes: all of them fit into six slots, so that a lane that the
// machine leaves standing for a while makes nobody stream.
constexpr std::size_t kIds = 3;

std::size_t decode_once(Client& client, std::mt19937& random, std::uint64_t* lookups) {
  std::size_t wrong = 0;
  for (std::uint32_t layer = 0; layer < moecached_model_layers(client.model()); ++layer) {
    const std::uint32_t first = static_cast<std::uint32_t>(random());
    std::array<std::int32_t, kIds> ids{}, slots{};
    for (std::uint32_t k = 0; k < kIds; ++k) ids[k] = static_cast<std::int32_t>((first + 5 * k) % kExperts);
    const auto status = moecached_lane_resolve(client.lane(), layer, ids.data(), 1, kIds, 0, slots.data());
    EXPECT_EQ(status, MOECACHED_OK) << moecached_last_error();
    if (status != MOECACHED_OK) return wrong + 1;
    *lookups += kIds;
    for (std::size_t k = 0; k < kIds; ++k) wrong += client.wrong_bytes(layer, ids[k], slots[k]);
  }
  moecached_lane_end(client.lane());
  return wrong;
}

TEST_F(PolicySwapTest, TenThousandWhileLanesDecodeLoseNoLookupNoResidentAndNoByte) {
  constexpr std::uint32_t kLanes = 2;
  std::vector<std::unique_ptr<Client>> clients;
  for (std::uint32_t i = 0; i < kLanes; ++i) clients.push_back(std::make_unique<Client>(folder_, model_));
  std::atomic<bool> done = false;
  std::array<std::atomic<std::uint64_t>, kLanes> lookups{};
  std::atomic<std::size_t> wrong = 0;
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < kLanes; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(i + 1);
      std::uint64_t n = 0;
      while (!done) {
        wrong += decode_once(*clients[i], random, &n);
        lookups[i] = n;
      }
    });
  }
  const std::vector<std::string> specs = all_specs();
  std::uint64_t swaps_between_lookups = 0, seen = 0;
  for (int i = 0; i < kSwaps; ++i) {
    const std::string& spec = specs[static_cast<std::size_t>(i) * 7 % specs.size()];
    const auto set = daemon_->set_policy({.model = i % 2 == 0 ? 0u : 1u}, spec);
    ASSERT_TRUE(set) << set.error().text;
    ASSERT_EQ(*set, spec);
    const std::uint64_t now = lookups[0] + lookups[1];
    swaps_between_lookups += now != std::exchange(seen, now) ? 1 : 0;
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(swaps_between_lookups, 100u) << "hardly anything was decoded meanwhile: it shows nothing";

  const std::uint64_t made = lookups[0] + lookups[1];
  std::uint64_t fallback = 0;
  for (const auto& client : clients) fallback += client->counters().fallback_reads;
  EXPECT_EQ(fallback, 0u);
  for (const SessionReport& session : daemon_->sessions()) EXPECT_EQ(session.records_dropped, 0u);
  Sums sums;
  for (int i = 0; i < 5000 && sums.lookups < made; ++i) {  // the rings are read when the loop gets to it
    sums = sum(daemon_->models().front());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(sums.lookups, made);
  EXPECT_EQ(sums.hits + sums.misses, made);
  EXPECT_GT(sums.evictions, 1000u);
  EXPECT_EQ(sums.insertions - sums.evictions, sums.resident);
  std::printf("%d swaps, %llu lookups, %llu evictions\n", kSwaps, static_cast<unsigned long long>(made),
              static_cast<unsigned long long>(sums.evictions));
}

TEST_F(PolicySwapTest, WhatIsResidentStays) {
  Client client(folder_, model_);
  std::mt19937 random(3);
  std::uint64_t lookups = 0;
  for (int i = 0; i < 50; ++i) EXPECT_EQ(decode_once(client, random, &lookups), 0u);
  std::array<std::int32_t, kExperts> all{}, before{}, after{};
  for (std::uint32_t i = 0; i < kExperts; ++i) all[i] = static_cast<std::int32_t>(i);
  const auto look = [&](std::array<std::int32_t, kExperts>& slots) {
    ASSERT_EQ(moecached_lane_resolve_resident(client.lane(), 1, all.data(), kExperts, slots.data()),
              MOECACHED_OK);
    moecached_lane_end(client.lane());
  };
  look(before);
  const ModelReport model = daemon_->models().front();
  for (const std::string& spec : all_specs()) ASSERT_TRUE(daemon_->set_policy({}, spec));
  look(after);
  EXPECT_EQ(after, before);
  EXPECT_EQ(std::ranges::count_if(before, [](std::int32_t slot) { return slot >= 0; }), 6);
  EXPECT_EQ(daemon_->models().front().bytes_read, model.bytes_read);
}

TEST_F(PolicySwapTest, OneThatIsRefusedChangesNothing) {
  Client client(folder_, model_);
  ASSERT_TRUE(daemon_->set_policy({}, "LFU:halve=64"));
  for (const PolicyTarget& target : {PolicyTarget{}, PolicyTarget{.model = 1}, PolicyTarget{.tier = "ram"}}) {
    EXPECT_FALSE(daemon_->set_policy(target, "lfu:halve=none"));
    EXPECT_FALSE(daemon_->set_policy(target, "no-such-policy"));
  }
  const auto wrong_tier = daemon_->set_policy({.model = 1, .tier = "gpu"}, "lru");
  ASSERT_FALSE(wrong_tier);
  EXPECT_EQ(wrong_tier.error().text, "model 1 is in RAM, not in tier 'gpu': leave the tier out");
  const auto no_tier = daemon_->set_policy({.tier = "tape"}, "lru");
  ASSERT_FALSE(no_tier);
  EXPECT_NE(no_tier.error().text.find("there is no tier 'tape': say ram or gpu"), std::string::npos);
  EXPECT_EQ(daemon_->set_policy({.model = 9}, "lru").error().code, FaultCode::kNotFound);
  for (const PolicyReport& policy : daemon_->policies()) {
    if (policy.tier == "ram") {
      EXPECT_EQ(policy.spec, "lfu:halve=64");
    }
  }
  EXPECT_EQ(daemon_->models().front().policy, "lfu:halve=64");
}

TEST_F(PolicySwapTest, ALibraryThatIsRefusedLeavesTheOldPolicy) {
  Client client(folder_, model_);
  ASSERT_TRUE(daemon_->set_policy({}, "lib:lru2:period=2"));
  EXPECT_THAT(error_of("lib:other_version"), HasSubstr("is made for version 7 of moecached_policy.h"));
  EXPECT_THAT(error_of("lib:no_entry"), HasSubstr("exports no moecached_policy_entry"));
  EXPECT_THAT(error_of("lib:absent"), HasSubstr("there is no " + (policies_ / "absent.so").string()));
  EXPECT_THAT(error_of("lib:liar:lie=none"), HasSubstr("refuses 'lie=none': it knows no such lie"));
  EXPECT_THAT(error_of("lib:lru2:period=x"), HasSubstr("period must be a whole number"));
  EXPECT_THAT(error_of("lib:../policies/lru2"), HasSubstr("is no name of a policy library"));
  EXPECT_EQ(daemon_->models().front().policy, "lib:lru2:period=2");
  EXPECT_EQ(daemon_->default_policy(), "lib:lru2:period=2");
  std::mt19937 random(5);
  std::uint64_t lookups = 0;
  for (int i = 0; i < 50; ++i) EXPECT_EQ(decode_once(client, random, &lookups), 0u);
}

TEST_F(PolicySwapTest, ALibraryThatLiesCostsNoByteAndIsReported) {
  Client client(folder_, model_);
  std::mt19937 random(6);
  std::uint64_t lookups = 0;
  for (const char* lie : {"fewer", "more", "huge", "twice", "nan"}) {
    ASSERT_TRUE(daemon_->set_policy({}, std::string("lib:liar:lie=") + lie));
    for (int i = 0; i < 50; ++i) EXPECT_EQ(decode_once(client, random, &lookups), 0u) << lie;
  }
  EXPECT_EQ(client.counters().fallback_reads, 0u);
  const auto findings = daemon_->doctor();
  EXPECT_EQ(std::ranges::count_if(findings,
                                  [](const Finding& finding) {
                                    return finding.subject == "policy lib:liar" &&
                                           finding.severity == "warning";
                                  }),
            1);
}

TEST_F(PolicySwapTest, LibrariesComeFromADirectoryThatIsSetAndSafeOnly) {
  using std::filesystem::perms;
  std::filesystem::permissions(policies_, perms::others_write, std::filesystem::perm_options::add);
  EXPECT_THAT(error_of("lib:lru2"), HasSubstr("can be written by others: chmod go-w"));
  std::filesystem::permissions(policies_, perms::others_write, std::filesystem::perm_options::remove);
  std::filesystem::permissions(policies_ / "lru2.so", perms::group_write, std::filesystem::perm_options::add);
  EXPECT_THAT(error_of("lib:lru2"), HasSubstr("lru2.so can be written by others"));
  std::filesystem::permissions(policies_ / "lru2.so", perms::group_write,
                               std::filesystem::perm_options::remove);
  EXPECT_EQ(error_of("lib:lru2"), "no error");
  policy_directory_.clear();
  restart();
  EXPECT_THAT(error_of("lib:lru2"), HasSubstr("this daemon loads no libraries; set policy.directory"));
}

TEST_F(PolicySwapTest, ADaemonDoesNotStartWithALibraryThatItCannotHave) {
  daemon_.reset();
  Config config;
  config.handle_socket = folder_ / "handle.sock";
  config.pool_bytes = 64u << 20;
  config.policy_directory = policies_;
  for (const auto& [spec, text] : std::initializer_list<std::pair<const char*, const char*>>{
           {"lib:absent", "there is no"}, {"lib:liar:lie=none", "refuses"}}) {
    config.policy = spec;
    const auto started = Daemon::start(config);
    ASSERT_FALSE(started) << spec;
    EXPECT_THAT(started.error().text, HasSubstr(text));
  }
  config.policy = "lib:lru2:admit=second-miss";
  EXPECT_TRUE(Daemon::start(config));
}

}  // namespace
}  // namespace moecached
