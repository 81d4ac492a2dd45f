// Clients that route over gRPC at a daemon that is a process of its own: they map its pool by a path, and
// compare every byte of every slot they are told with what the file holds.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "tests/integration/client_daemon_fixture.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/route_client.h"

namespace moecached {
namespace {

using grpc::StatusCode;
using test::RouteClient;
using testing::HasSubstr;
using namespace std::chrono_literals;
using Ids = std::vector<std::uint32_t>;

constexpr std::uint32_t kLayers = 3, kSlots = 6;

class RouteStreamTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/moecached-route-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
    model_ = folder_ / "model.gguf";
    test::write_file(
        model_,
        test::make_moe({.n_layers = kLayers, .n_experts = kExperts, .n_expert_used = kTopK, .biases = true})
            .build()
            .bytes);
  }
  void TearDown() override {
    if (daemon_ > 0) {
      EXPECT_EQ(stop(), 0);
    }
    std::filesystem::remove_all(folder_);
  }
  [[nodiscard]] std::string control() const { return folder_ / "control.sock"; }

  void start(std::vector<std::string> flags) {
    flags.insert(flags.begin(), {MOECACHED_DAEMON, "--config", "/dev/null", "--directory", folder_.string(),
                                 "--slots", std::to_string(kSlots), "--pool-bytes", "64MiB"});
    std::vector<char*> argv;
    for (std::string& flag : flags) argv.push_back(flag.data());
    argv.push_back(nullptr);
    ASSERT_EQ(::posix_spawn(&daemon_, MOECACHED_DAEMON, nullptr, nullptr, argv.data(), environ), 0);
    const auto channel = grpc::CreateChannel("unix:" + control(), grpc::InsecureChannelCredentials());
    stub_ = control::v1::Control::NewStub(channel);
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + 60s);
    control::v1::RegisterModelRequest request;
    request.add_paths(model_);
    control::v1::RegisterModelResponse registered;
    const grpc::Status status = stub_->RegisterModel(&context, request, &registered);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  void start() { start({"--control-route"}); }
  // Its exit status.
  int stop() {
    ::kill(daemon_, SIGTERM);
    int status = -1;
    ::waitpid(daemon_, &status, 0);
    daemon_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  control::v1::Stats stats() {
    grpc::ClientContext context;
    control::v1::Stats out;
    EXPECT_TRUE(stub_->GetStats(&context, {}, &out).ok());
    return out;
  }
  // Waits until the daemon serves so many sessions.
  void wait_for_sessions(std::uint32_t n) {
    for (int i = 0; i < 6000 && stats().sessions() != n; ++i) std::this_thread::sleep_for(10ms);
    EXPECT_EQ(stats().sessions(), n);
  }

  std::filesystem::path folder_, model_;
  pid_t daemon_ = 0;
  std::unique_ptr<control::v1::Control::Stub> stub_;
};

control::v1::RouteOpen in_pool() {
  control::v1::RouteOpen open;
  open.set_label("route test");
  open.set_memory(control::v1::ROUTE_MEMORY_POOL);
  return open;
}

// Bytes of the slot that differ from the expert's in the file.
std::size_t wrong_bytes(const RouteClient& client, std::uint32_t layer, std::uint32_t expert,
                        std::uint32_t slot) {
  const control::v1::RouteLayer& of = client.geometry().layers(static_cast<int>(layer));
  std::size_t wrong = 0;
  for (int p = 0; p < of.parts_size(); ++p) {
    std::vector<std::byte> expected(of.parts(p).expert_bytes());
    test::fill_tensor_bytes(of.parts(p).name(), expert * expected.size(), expected);
    const std::span<const std::byte> seen = client.part(layer, slot, p);
    for (std::size_t i = 0; i < expected.size(); ++i) wrong += seen[i] != expected[i] ? 1 : 0;
  }
  return wrong;
}

// The same, of all that the last answer names.
std::size_t wrong_bytes(const RouteClient& client, std::uint32_t layer, const Ids& ids) {
  EXPECT_EQ(client.slots().slots_size(), static_cast<int>(ids.size()));
  std::size_t wrong = 0;
  for (int i = 0; i < client.slots().slots_size(); ++i)
    wrong += wrong_bytes(client, layer, ids[static_cast<std::size_t>(i)], client.slots().slots(i));
  return wrong;
}

// Tries until it is true: a lease can be told that others stand still and keep what they use, and so a loaded
// machine looks.
template <typename Try>
bool in_time(Try attempt) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (!attempt()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

TEST_F(RouteStreamTest, AMissIsAnsweredWhenItsBytesAreThereAndAHitAsItIs) {
  start();
  RouteClient client(control());
  ASSERT_TRUE(client.open(in_pool())) << client.finish().error_message();
  EXPECT_EQ(client.geometry().n_expert_used(), kTopK);
  ASSERT_EQ(client.geometry().layers_size(), static_cast<int>(kLayers));
  const Ids ids = {9, 2, 9, 14};
  ASSERT_TRUE(client.decide(1, ids, 2)) << client.refused().text();
  EXPECT_EQ(client.slots().n_distinct(), 3u);
  EXPECT_EQ(client.slots().n_absent(), 3u);
  EXPECT_EQ(wrong_bytes(client, 1, ids), 0u);
  EXPECT_EQ(client.slots().slots(0), client.slots().slots(2)) << "the same expert twice";
  EXPECT_GT(wrong_bytes(client, 1, ids[0], client.slots().slots(1)), 0u) << "the checker sees a wrong expert";
  // The table as far as this client has not heard of it.
  std::map<std::uint32_t, std::int32_t> table;
  for (const control::v1::RouteEntry& entry : client.slots().changed()) table[entry.expert()] = entry.slot();
  EXPECT_EQ(table.size(), 3u);
  EXPECT_EQ(table[14], static_cast<std::int32_t>(client.slots().slots(3)));

  ASSERT_TRUE(client.decide(1, {14, 2}));
  EXPECT_EQ(client.slots().n_absent(), 0u);
  EXPECT_EQ(client.slots().changed_size(), 0);
  EXPECT_EQ(wrong_bytes(client, 1, {14, 2}), 0u);
  // Three slots are free, the fourth newcomer takes the place of one.
  ASSERT_TRUE(client.decide(1, {0, 1, 3, 4}));
  EXPECT_EQ(wrong_bytes(client, 1, {0, 1, 3, 4}), 0u);
  for (const control::v1::RouteEntry& entry : client.slots().changed()) table[entry.expert()] = entry.slot();
  EXPECT_EQ(std::ranges::count_if(table, [](const auto& entry) { return entry.second >= 0; }), kSlots);
  EXPECT_TRUE(client.finish().ok());
  EXPECT_EQ(stats().total().lookups(), 3u + 2u + 4u) << "the policy sees what rings see";
}

TEST_F(RouteStreamTest, WhatAnAnswerNamesStaysUntilTheClientReleasesIt) {
  start();
  RouteClient holder(control()), other(control());
  ASSERT_TRUE(holder.open(in_pool()));
  ASSERT_TRUE(other.open(in_pool()));
  const Ids held = {0, 1, 2}, beside = {3, 4, 5}, all = {3, 4, 5, 6, 7, 8};
  ASSERT_TRUE(holder.decide(0, held));
  const control::v1::RouteSlots answer = holder.slots();
  ASSERT_TRUE(other.decide(0, beside)) << "they fit beside what is held";
  EXPECT_EQ(wrong_bytes(other, 0, beside), 0u);
  EXPECT_FALSE(other.decide(0, all)) << "all slots, of which three are held by one that does not move";
  EXPECT_EQ(other.refused().code(), static_cast<std::uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_THAT(other.refused().text(), HasSubstr("6 distinct experts"));
  for (std::size_t i = 0; i < held.size(); ++i)
    EXPECT_EQ(wrong_bytes(holder, 0, held[i], answer.slots(static_cast<int>(i))), 0u);
  ASSERT_TRUE(holder.release());
  // Until the release has arrived.
  EXPECT_TRUE(in_time([&] { return other.decide(0, all); })) << other.refused().text();
  EXPECT_EQ(wrong_bytes(other, 0, all), 0u);
}

TEST_F(RouteStreamTest, WrongDecisionsAreNamedAndTheStreamServesTheNextOne) {
  start();
  RouteClient client(control());
  ASSERT_TRUE(client.open(in_pool()));
  const auto refusal = [&](std::uint32_t layer, const Ids& ids, std::uint32_t n_tokens = 1) {
    EXPECT_FALSE(client.decide(layer, ids, n_tokens));
    EXPECT_TRUE(client.was_refused());
    return client.refused();
  };
  const auto invalid = static_cast<std::uint32_t>(StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(refusal(kLayers, {0}).code(), invalid);
  EXPECT_THAT(client.refused().text(), HasSubstr("3 MoE layers"));
  EXPECT_EQ(refusal(0, {0, kExperts}).code(), invalid);
  EXPECT_THAT(client.refused().text(), HasSubstr("expert 16"));
  EXPECT_EQ(refusal(0, {UINT32_MAX}).code(), invalid);
  EXPECT_EQ(refusal(0, {}).code(), invalid);
  EXPECT_EQ(refusal(0, {1, 2, 3}, 2).code(), invalid);
  EXPECT_EQ(refusal(0, Ids(client.geometry().ids_max() + 1)).code(), invalid);
  Ids all(kSlots + 1);
  std::iota(all.begin(), all.end(), 0u);
  EXPECT_EQ(refusal(0, all).code(), static_cast<std::uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_THAT(client.refused().text(), HasSubstr("pool.slots"));
  ASSERT_TRUE(client.decide(0, {1, 2}));
  EXPECT_EQ(wrong_bytes(client, 0, {1, 2}), 0u);
  EXPECT_EQ(stats().records_refused(), 0u) << "none of it has reached a ring";

  RouteClient unknown(control()), too_long(control());
  control::v1::RouteOpen open = in_pool();
  open.set_model(77);
  EXPECT_FALSE(unknown.open(open));
  EXPECT_EQ(unknown.finish().error_code(), StatusCode::NOT_FOUND);
  open.set_label(std::string(2u << 20, 'x'));
  EXPECT_FALSE(too_long.open(open));
  EXPECT_EQ(too_long.finish().error_code(), StatusCode::RESOURCE_EXHAUSTED) << "a message has a limit";
}

// Two streams and a client of the ring, in a pool of six slots for sixteen experts.
TEST_F(RouteStreamTest, EverySlotHoldsItsExpertWhileTheyAreSwappedUnderAllKindsOfClients) {
  start();
  std::atomic<std::size_t> wrong = 0, absent = 0;
  const auto by_stream = [&](std::uint32_t seed) {
    RouteClient client(control());
    ASSERT_TRUE(client.open(in_pool()));
    std::mt19937 random(seed);
    for (std::uint32_t i = 0; i < 900; ++i) {
      const std::uint32_t layer = i % kLayers;
      Ids ids(kTopK);
      for (auto& id : ids) id = static_cast<std::uint32_t>(random() % kExperts);
      ASSERT_TRUE(in_time([&] { return client.decide(layer, ids); })) << client.refused().text();
      absent += client.slots().n_absent();
      wrong += wrong_bytes(client, layer, ids);
      if (layer + 1 == kLayers) client.release();
    }
  };
  const auto by_ring = [&](std::uint32_t seed) {
    Client client(folder_, model_);
    std::mt19937 random(seed);
    for (std::uint32_t i = 0; i < 450; ++i) {
      std::int32_t ids[kTopK], slots[kTopK];
      for (auto& id : ids) id = static_cast<std::int32_t>(random() % kExperts);
      ASSERT_TRUE(in_time([&] {
        return moecached_lane_resolve(client.lane(), i % kLayers, ids, 1, kTopK, 0, slots) == MOECACHED_OK;
      })) << moecached_last_error();
      for (std::size_t k = 0; k < kTopK; ++k) wrong += client.wrong_bytes(i % kLayers, ids[k], slots[k]);
    }
    EXPECT_EQ(client.counters().fallback_reads, 0u);
  };
  std::thread first(by_stream, 1), second(by_stream, 2), third(by_ring, 3);
  first.join();
  second.join();
  third.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(absent, 100u);
  EXPECT_GT(stats().total().evictions(), 100u);
}

TEST_F(RouteStreamTest, AStreamThatEndsAnyhowHoldsNothing) {
  start({"--control-route", "--limits-route-streams", "64"});  // some end later than the next one begins
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    RouteClient client(control());
    ASSERT_TRUE(client.open(in_pool()));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      control::v1::RouteRequest request;
      request.mutable_decision()->set_layer(layer);
      for (std::uint32_t k = 0; k < kSlots; ++k)
        request.mutable_decision()->add_experts(static_cast<std::uint32_t>(random() % kExperts));
      client.send(request);
    }
    // Before, within or behind one of the leases.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    client.cancel();
    EXPECT_EQ(client.finish().error_code(), StatusCode::CANCELLED);
  }
  wait_for_sessions(0);
  RouteClient client(control());
  ASSERT_TRUE(client.open(in_pool()));
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint32_t first = 0; first + kSlots <= kExperts; first += kSlots) {
      Ids ids(kSlots);
      std::iota(ids.begin(), ids.end(), first);
      ASSERT_TRUE(client.decide(layer, ids)) << client.refused().text();
      EXPECT_EQ(wrong_bytes(client, layer, ids), 0u);
    }
  }
}

TEST_F(RouteStreamTest, ThePoolCannotBeMappedWritableByItsPath) {
  start({"--control-route", "--pool-scope", "layer"});
  RouteClient client(control());
  ASSERT_TRUE(client.open(in_pool()));
  const std::string path = client.geometry().pool().path();
  // Root may open nearly everything for writing; a sealed pool is not to be written all the same.
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0) << path;
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_NE(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0), MAP_FAILED);
  ::close(fd);
  RouteClient without(control());
  control::v1::RouteOpen open;
  ASSERT_TRUE(without.open(open));
  EXPECT_FALSE(without.geometry().has_pool()) << "nobody asked for it";
}

TEST_F(RouteStreamTest, AStreamIsASessionThatIsCountedAndListed) {
  start({"--control-route", "--limits-route-streams", "2", "--limits-sessions", "3"});
  RouteClient first(control()), second(control());
  ASSERT_TRUE(first.open(in_pool()));
  ASSERT_TRUE(second.open(in_pool()));
  RouteClient third(control());
  EXPECT_FALSE(third.open(in_pool()));
  EXPECT_THAT(third.finish().error_message(), HasSubstr("limits.route_streams = 2"));
  ASSERT_TRUE(first.decide(0, {1, 2, 3}));
  grpc::ClientContext context;
  control::v1::ListSessionsResponse sessions;
  ASSERT_TRUE(stub_->ListSessions(&context, {}, &sessions).ok());
  ASSERT_EQ(sessions.sessions_size(), 2);
  EXPECT_EQ(sessions.sessions(0).label(), "route test");
  EXPECT_EQ(sessions.sessions(0).lookups(), 3u);
  EXPECT_EQ(sessions.sessions(0).models_size(), 1);
  EXPECT_TRUE(first.finish().ok());
  wait_for_sessions(1);
  RouteClient again(control());
  EXPECT_TRUE(again.open(in_pool()));
}

TEST_F(RouteStreamTest, ADaemonThatStopsTakesNoSlotAway) {
  start();
  RouteClient client(control());
  ASSERT_TRUE(client.open(in_pool()));
  ASSERT_TRUE(client.decide(2, {5, 6, 7, 8}));
  const control::v1::RouteSlots answer = client.slots();
  EXPECT_EQ(stop(), 0);
  EXPECT_FALSE(client.finish().ok());
  for (int i = 0; i < answer.slots_size(); ++i)
    EXPECT_EQ(wrong_bytes(client, 2, 5 + static_cast<std::uint32_t>(i), answer.slots(i)), 0u);
}

TEST_F(RouteStreamTest, ADaemonThatRoutesOverTheRingAloneSaysSo) {
  start({});
  RouteClient client(control());
  EXPECT_FALSE(client.open(in_pool()));
  const grpc::Status status = client.finish();
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("[control] route = true"));
}

// -- the lane alone, in one process, where the moment is ours to choose
using RemoteLaneTest = ClientDaemonTest;

RouteDecision decision_of(const Ids& ids) { return {.layer = 0, .experts = ids, .n_tokens = 1}; }

TEST_F(RemoteLaneTest, OneThatLeavesInTheMiddleOfALeaseHoldsNothing) {
  Client client(folder_, model_);  // opens the model
  int left = 0;
  RouteAnswer answer;
  for (std::uint32_t i = 0; i < 50; ++i) {
    auto lane = daemon_->open_route({.model = 0, .label = "l"});
    ASSERT_TRUE(lane) << lane.error().text;
    const std::uint32_t first = i % 2 == 0 ? 0 : 6;
    const Ids ids = {first, first + 1, first + 2, first + 3, first + 4, first + 5};
    const Status decided = (*lane)->decide(
        decision_of(ids), [] { return true; }, &answer);
    left += decided ? 0 : 1;
    if (!decided) {
      EXPECT_EQ(decided.error().code, FaultCode::kNotFound) << decided.error().text;
    }
  }
  EXPECT_GT(left, 0) << "the core loop is not as fast as all that";
  EXPECT_EQ(client.decode(1, 50), 0u);
  EXPECT_EQ(client.counters().fallback_reads, 0u);
}

TEST_F(RemoteLaneTest, OneThatIsLeftOpenKeepsWhatItWasTold) {
  Client client(folder_, model_);
  {
    auto lane = daemon_->open_route({.model = 0, .label = "l"});
    ASSERT_TRUE(lane) << lane.error().text;
    RouteAnswer answer;
    const Ids ids = {0, 1, 2, 3};
    ASSERT_TRUE((*lane)->decide(
        decision_of(ids), [] { return false; }, &answer));
    (*lane)->leave_open();
  }
  // Whoever else comes gets the two slots that are left.
  std::int32_t experts[] = {8, 9, 10}, slots[3];
  EXPECT_EQ(moecached_lane_resolve(client.lane(), 0, experts, 1, 3, 0, slots), MOECACHED_E_TOO_MANY);
  EXPECT_EQ(moecached_lane_resolve(client.lane(), 0, experts, 1, 2, 0, slots), MOECACHED_OK);
  EXPECT_EQ(daemon_->sessions().size(), 2u);
}

TEST_F(RemoteLaneTest, AFileThatChangesIsNotReadAsIfItHadNot) {
  Client client(folder_, model_);
  auto lane = daemon_->open_route({.model = 0, .label = "l"});
  ASSERT_TRUE(lane) << lane.error().text;
  std::ofstream(model_, std::ios::app) << "x";
  RouteAnswer answer;
  const Ids ids = {0, 1};
  const Status decided = (*lane)->decide(
      decision_of(ids), [] { return false; }, &answer);
  ASSERT_FALSE(decided);
  EXPECT_EQ(decided.error().code, FaultCode::kChanged) << decided.error().text;
}

}  // namespace
}  // namespace moecached
