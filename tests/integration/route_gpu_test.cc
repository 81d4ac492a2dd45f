// Lanes on a GPU of clients that route over gRPC: what the daemon takes for them and gives back, and what it
// refuses. That the bytes are right, another process checks (route_ipc_test.py).
#include <gmock/gmock.h>

#include "tests/integration/gpu_daemon_fixture.h"

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Ids = std::vector<std::uint32_t>;

class RouteGpuTest : public GpuDaemonTest {
 protected:
  Result<std::unique_ptr<RouteLane>> open(RouteMemory memory = RouteMemory::kCudaIpc,
                                          std::uint32_t experts = 0) {
    return daemon_->open_route({.model = 0, .label = "l", .memory = memory, .experts = experts});
  }
  static Status decide(RouteLane& lane, const Ids& ids, std::uint32_t n_tokens, RouteAnswer* out) {
    return lane.decide(
        {.layer = 1, .experts = ids, .n_tokens = n_tokens}, [] { return false; }, out);
  }
  std::uint64_t free_bytes() {
    std::string reason;
    const auto gpus = list_gpus(&reason);
    return gpus.front()->memory_info()->free;
  }
};

TEST_F(RouteGpuTest, AModelIsRegisteredOnAGpuOnceAndRoutedTo) {
  start({.kind = SlotsSpec::Kind::kCount, .value = 6});
  const std::string uuid = to_string(gpu_at(0));
  const auto id = daemon_->register_model({model_}, uuid);
  ASSERT_TRUE(id) << id.error().text;
  const auto again = daemon_->register_model({model_}, uuid);
  ASSERT_TRUE(again) << again.error().text;
  EXPECT_EQ(*id, *again);
  EXPECT_EQ(report().device, uuid);
  EXPECT_EQ(daemon_->register_model({model_}, "gpu 0").error().code, FaultCode::kInvalid);
  EXPECT_EQ(daemon_->register_model({model_}, "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff").error().code,
            FaultCode::kNotFound);

  const std::uint64_t before = free_bytes();
  {
    auto lane = open();
    ASSERT_TRUE(lane) << lane.error().text;
    EXPECT_EQ((*lane)->geometry().cuda.handle.size(), 64u);
    EXPECT_EQ((*lane)->geometry().cuda.uuid, uuid);
    EXPECT_EQ((*lane)->geometry().layers.at(1).n_slots, kTopK);
    EXPECT_LT(free_bytes(), before);
    RouteAnswer answer;
    const Status decided = decide(**lane, {3, 9, 3, 1}, 1, &answer);
    ASSERT_TRUE(decided) << decided.error().text;
    EXPECT_THAT(answer.slots, ElementsAre(0, 1, 0, 2));
    EXPECT_EQ(answer.n_distinct, 3u);
    EXPECT_EQ(answer.n_absent, 3u) << "no graph has run, so there are no device slots";
    const Status too_many = decide(**lane, {0, 1, 2, 3, 4}, 1, &answer);
    ASSERT_FALSE(too_many);
    EXPECT_EQ(too_many.error().code, FaultCode::kLimit);
    EXPECT_THAT(too_many.error().text, HasSubstr("room for 4"));
  }
  while (!daemon_->sessions().empty()) std::this_thread::yield();
  EXPECT_TRUE(daemon_->drop_model(*id)) << "no session uses it any more";
}

TEST_F(RouteGpuTest, WhatALaneUsesIsLearntAndMovesIntoSlots) {
  start({.kind = SlotsSpec::Kind::kCount, .value = 6});
  ASSERT_TRUE(daemon_->register_model({model_}, to_string(gpu_at(0))));
  auto lane = open(RouteMemory::kCudaIpc, 2 * kTopK);
  ASSERT_TRUE(lane) << lane.error().text;
  RouteAnswer answer;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  do {
    const Status decided = decide(**lane, {1, 2, 3, 4, 4, 5, 6, 1}, 2, &answer);
    ASSERT_TRUE(decided) << decided.error().text;
    EXPECT_EQ(answer.n_distinct, 6u);
  } while (answer.n_absent > 0 && std::chrono::steady_clock::now() < deadline);
  EXPECT_EQ(answer.n_absent, 0u);
  EXPECT_GT(report().bytes_uploaded, 0u);
  EXPECT_GT(report().layers.at(1).hits, 0u);
  EXPECT_EQ(daemon_->sessions().front().records_refused, 0u);
}

TEST_F(RouteGpuTest, EachKindOfMemoryHasItsKindOfModel) {
  start({.kind = SlotsSpec::Kind::kCount, .value = 6});
  ASSERT_TRUE(daemon_->register_model({model_}, {}));
  const auto in_ram = open();
  ASSERT_FALSE(in_ram);
  EXPECT_EQ(in_ram.error().code, FaultCode::kUnsupported);
  EXPECT_THAT(in_ram.error().text, HasSubstr("in RAM"));
  ASSERT_TRUE(daemon_->drop_model(1));
  ASSERT_TRUE(daemon_->register_model({model_}, to_string(gpu_at(0))));
  for (const RouteMemory memory : {RouteMemory::kNone, RouteMemory::kPool}) {
    const auto on_gpu = open(memory);
    ASSERT_FALSE(on_gpu);
    EXPECT_THAT(on_gpu.error().text, HasSubstr("on a GPU"));
  }
  EXPECT_TRUE(daemon_->sessions().empty());
}

TEST_F(RouteGpuTest, AClientThatMayStillBeReadingKeepsItsMemory) {
  start({.kind = SlotsSpec::Kind::kCount, .value = 6});
  ASSERT_TRUE(daemon_->register_model({model_}, to_string(gpu_at(0))));
  const std::uint64_t before = free_bytes();
  {
    auto ended = open();
    ASSERT_TRUE(ended);
  }
  EXPECT_EQ(free_bytes(), before);
  {
    auto left_open = open();
    ASSERT_TRUE(left_open);
    (*left_open)->leave_open();
  }
  EXPECT_LT(free_bytes(), before);
}

TEST_F(RouteGpuTest, AStreamWaitsWhileTheModelLoadsUnlessItsClientLeaves) {
  start({.kind = SlotsSpec::Kind::kCount, .value = 6}, 100, "ewma", true);
  ASSERT_TRUE(daemon_->register_model({model_}, to_string(gpu_at(0))));
  auto lane = open(), leaving = open();
  ASSERT_TRUE(lane);
  ASSERT_TRUE(leaving);
  RouteAnswer answer;
  if (report().loading) {
    const Ids ids = {1};
    const Status left = (*leaving)->decide(
        {.layer = 0, .experts = ids, .n_tokens = 1}, [] { return true; }, &answer);
    EXPECT_TRUE(left || left.error().code == FaultCode::kNotFound) << left.error().text;
  }
  EXPECT_TRUE(decide(**lane, {1, 2, 3, 4}, 1, &answer));
  EXPECT_FALSE(report().loading);
}

}  // namespace
}  // namespace moecached
