// Which copies become fetches, and which stay copies.
#include "shim/ggml/cuda_fetch.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "tests/unit/shim/fake_backend_copy.h"
#include "tests/unit/shim/fake_client.h"

namespace moecached::testing {
namespace {

using shim::FetchScope;
using shim::PlannedFetch;

class CudaFetchTest : public ::testing::Test {
 protected:
  void SetUp() override { reset_fake_daemon(); }

  static uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }
  int copy(const std::array<int32_t, 4>& from, std::array<int32_t, 4>& to) {
    return FakeBackendCopy::hooked().copy(to.data(), from.data(), sizeof from, &stream_);
  }
  [[nodiscard]] int runtime_copies() const { return FakeBackendCopy::hooked().runtime_copies(); }
  [[nodiscard]] std::vector<PlannedFetch> planned() const {
    return {{address(planned_to_.data()), address(slots_.data()), 4, 5, 1}};
  }
  moecached_gpu_lane* lane() { return reinterpret_cast<moecached_gpu_lane*>(&stream_); }

  int stream_ = 0;
  std::array<int32_t, 4> slots_ = {1, 2, 3, 4};
  std::array<int32_t, 4> planned_to_ = {}, other_ = {};
};

TEST_F(CudaFetchTest, TurnsAPlannedCopyIntoAFetchOnItsStream) {
  const auto fetches = planned();
  const FetchScope::Enqueue fetch_it = [&](const PlannedFetch& fetch, void* stream) {
    return fetch.share == 1 && shim::fetch_on(lane(), fetch, stream);
  };
  const FetchScope scope(fetches, fetch_it);
  const int before = runtime_copies();
  ASSERT_EQ(copy(slots_, planned_to_), 0);
  EXPECT_EQ(runtime_copies(), before) << "stock's copy would overwrite what was fetched";
  ASSERT_EQ(fake_daemon().fetches.size(), 1u);
  const moecached_gpu_fetch& fetch = fake_daemon().fetches[0];
  EXPECT_EQ(fetch.stream, &stream_);
  EXPECT_EQ(fetch.slots, address(slots_.data()));
  EXPECT_EQ(fetch.fetched, address(planned_to_.data()));
  EXPECT_EQ(fetch.n_ids, 4u);
  EXPECT_EQ(fetch.layer, 5u);
}

TEST_F(CudaFetchTest, LeavesAllOtherCopiesAlone) {
  const auto fetches = planned();
  const FetchScope::Enqueue fetch_it = [&](const PlannedFetch& fetch, void* stream) {
    return shim::fetch_on(lane(), fetch, stream);
  };
  const int before = runtime_copies();
  {
    const FetchScope scope(fetches, fetch_it);
    ASSERT_EQ(copy(slots_, other_), 0);
    EXPECT_EQ(other_, slots_);
    FakeBackendCopy::hooked().copy(planned_to_.data(), slots_.data(), 8, &stream_);  // of another size
  }
  ASSERT_EQ(copy(slots_, planned_to_), 0);  // behind the graph
  EXPECT_EQ(planned_to_, slots_);
  EXPECT_EQ(runtime_copies(), before + 3);
  EXPECT_TRUE(fake_daemon().fetches.empty());
}

TEST_F(CudaFetchTest, CopiesTheSlotsWhenTheFetchFails) {
  const auto fetches = planned();
  const FetchScope::Enqueue fetch_it = [&](const PlannedFetch& fetch, void* stream) {
    return shim::fetch_on(lane(), fetch, stream);
  };
  const FetchScope scope(fetches, fetch_it);
  fake_daemon().fetch_status = MOECACHED_E_SYSTEM;
  ASSERT_EQ(copy(slots_, planned_to_), 0);
  EXPECT_EQ(planned_to_, slots_) << "then experts are read in place";
}

TEST_F(CudaFetchTest, NeedsALibraryThatImportsTheCopy) {
  EXPECT_TRUE(shim::can_fetch() || !shim::install_fetch_hook(reinterpret_cast<const void*>(&dlopen)));
}

}  // namespace
}  // namespace moecached::testing
