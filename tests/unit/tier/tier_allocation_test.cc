// A read must not allocate: counts every operator new of the program, on any thread.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/unit/tier/counted_new.h"
#include "tests/unit/tier/tier_support.h"

namespace moecached {
namespace {

class SteadyPath : public testing::TestWithParam<SsdEngine> {};

TEST_P(SteadyPath, AllocatesNothing) {
  if (GetParam() == SsdEngine::kIoUring && !has_io_uring()) GTEST_SKIP() << "io_uring is refused here";
  SsdOptions options;
  options.engine = GetParam();
  const TempFolder folder;
  const ModelFile file(folder, "model", 4u << 20);
  const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier(options));
  ASSERT_NE(tier, nullptr);
  const FileId id = add(*tier, file);
  Memory memory(8u << 20);
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 64; ++i) {
    requests.push_back(request_of(
        i, {{id, i * 60'000, 40'000, memory.data() + i * 65'536, false},
            {id, i * 60'000, 40'000, memory.data() + (4u << 20) + i * 65'536 + i * 60'000 % kBlock, true}}));
  }
  std::vector<ReadDone> done(64);
  std::size_t n_ok = 0;
  const auto round = [&] {
    std::size_t n_left = tier->submit(requests);
    while (n_left > 0) {
      pollfd event{tier->event_fd(), POLLIN, 0};
      ::poll(&event, 1, -1);
      const std::size_t n = tier->poll(done);
      for (std::size_t i = 0; i < n; ++i) n_ok += done[i].result == ReadResult::kOk;
      n_left -= n;
    }
  };
  round();
  const std::uint64_t before = n_allocations();
  for (int i = 0; i < 5; ++i) round();
  EXPECT_EQ(n_allocations(), before);
  EXPECT_EQ(n_ok, 6 * requests.size());
  EXPECT_GT(before, 0u) << "allocations are not counted";
}

INSTANTIATE_TEST_SUITE_P(Engines, SteadyPath, testing::Values(SsdEngine::kIoUring, SsdEngine::kPread),
                         [](const auto& instance) {
                           return instance.param == SsdEngine::kIoUring ? "IoUring" : "Pread";
                         });

}  // namespace
}  // namespace moecached
