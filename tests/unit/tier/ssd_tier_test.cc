// The SSD tier over real files, with both engines, directly and through the page cache, on the disk of the
// build and on tmpfs.
#include "daemon/tier/ssd_tier.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "daemon/platform/device.h"
#include "tests/unit/tier/tier_support.h"

namespace moecached {
namespace {

enum class Place { kDisk, kTmpfs };
using Setup = std::tuple<SsdEngine, bool /* direct */, Place>;

std::string name_of(const testing::TestParamInfo<Setup>& info) {
  const auto& [engine, direct, place] = info.param;
  return std::string(engine == SsdEngine::kIoUring ? "IoUring" : "Pread") + (direct ? "Direct" : "Buffered") +
         (place == Place::kDisk ? "OnDisk" : "OnTmpfs");
}

class SsdTierOf : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    if (std::get<0>(GetParam()) == SsdEngine::kIoUring && !has_io_uring())
      GTEST_SKIP() << "io_uring is refused here";
    options_.engine = std::get<0>(GetParam());
    options_.direct = std::get<1>(GetParam());
  }
  void start() { tier_ = value_of(make_ssd_tier(options_)); }

  SsdOptions options_;
  TempFolder folder_{std::get<2>(GetParam()) == Place::kDisk ? std::filesystem::current_path().string()
                                                             : "/dev/shm"};
  std::unique_ptr<SsdTier> tier_;
};

// Destinations as a model has them: slots with blocks of their own for direct parts, packed ones for others.
TEST_P(SsdTierOf, ReadsEveryByteOfRandomRequestsAndWritesNoOther) {
  options_.max_read_bytes = 64u << 10;
  options_.queue_depth = 8;
  start();
  ASSERT_NE(tier_, nullptr);
  const ModelFile a(folder_, "a", 3'000'017, 1), b(folder_, "b", 700'001, 2);
  const FileId ids[2] = {add(*tier_, a), add(*tier_, b)};
  const ModelFile* const files[2] = {&a, &b};
  std::mt19937_64 random(42);
  const auto below = [&](std::uint64_t n) { return random() % n; };

  for (int round = 0; round < 5; ++round) {
    Memory memory(12u << 20);
    std::vector<std::pair<std::size_t, std::size_t>> may_write;  // ascending
    std::size_t used = 0;
    std::vector<ReadRequest> requests(1 + below(16));
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ReadRequest& request = requests[i];
      request.tag = i;
      request.n_parts = static_cast<std::uint32_t>(1 + below(kMaxPartReads));
      for (std::uint32_t p = 0; p < request.n_parts; ++p) {
        PartRead& part = request.parts[p];
        const std::size_t file = below(2);
        part.file = ids[file];
        part.offset = below(files[file]->size());
        part.bytes = below(
            std::min<std::uint64_t>(files[file]->size() - part.offset, below(4) == 0 ? 200'000 : 3000) + 1);
        part.direct = below(2) == 0;
        const std::size_t alignment =
            tier_->direct_alignment(part.file) == 0 ? 1 : tier_->direct_alignment(part.file);
        std::size_t begin = used;
        if (part.direct)
          begin = used =
              (used + alignment - 1) / alignment * alignment + kBlock;  // a gap that shows too early a start
        if (part.direct && below(4) != 0) used += part.offset % alignment;
        part.destination = memory.data() + used;
        used += part.bytes;
        if (part.direct) used = (used + alignment - 1) / alignment * alignment;
        ASSERT_LE(used, memory.span().size());
        may_write.emplace_back(begin, used);
      }
    }
    const Outcomes outcomes = run(*tier_, requests);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(outcomes.at(i), ReadResult::kOk);
      for (std::uint32_t p = 0; p < requests[i].n_parts; ++p) {
        const PartRead& part = requests[i].parts[p];
        ASSERT_TRUE((part.file == ids[0] ? a : b).equal(part.offset, part.destination, part.bytes))
            << "request " << i << " part " << p;
      }
    }
    std::size_t end = 0;
    for (const auto& [begin_allowed, end_allowed] : may_write) {
      ASSERT_TRUE(memory.untouched(end, begin_allowed)) << "before byte " << begin_allowed;
      end = end_allowed;
    }
    ASSERT_TRUE(memory.untouched(end, memory.span().size())) << "behind the last destination";
  }
  const SsdStats stats = tier_->stats();
  EXPECT_EQ(stats.errors, 0u);
  EXPECT_GE(stats.bytes_read, stats.bytes_wanted - stats.bytes_wanted / 2)
      << "neighbours may share blocks, but not that many";
  EXPECT_GT(stats.depth_max, 1u);
  EXPECT_LE(stats.depth_max, 8u);
}

TEST_P(SsdTierOf, ReadsThePartAtTheVeryEndOfAFileThatIsNotAMultipleOfTheBlock) {
  start();
  ASSERT_NE(tier_, nullptr);
  for (const std::size_t file_bytes :
       {std::size_t{1}, std::size_t{511}, std::size_t{5000}, std::size_t{1'048'577}}) {
    const ModelFile file(folder_, "end", file_bytes);
    const FileId id = add(*tier_, file);
    for (const bool direct : {false, true}) {
      for (const std::size_t n : {std::size_t{1}, std::min<std::size_t>(file_bytes, 700), file_bytes}) {
        Memory memory(file_bytes + 2 * kBlock);
        const std::uint64_t offset = file_bytes - n;
        std::byte* const destination = memory.data() + (direct ? offset % kBlock : 3);
        ASSERT_EQ(run_one(*tier_, request_of(1, {{id, offset, n, destination, direct}})), ReadResult::kOk)
            << file_bytes << " " << n;
        EXPECT_TRUE(file.equal(offset, destination, n)) << file_bytes << " " << n;
      }
    }
    tier_->remove_file(id);
  }
}

TEST_P(SsdTierOf, FailsWhatLiesBeyondTheEndOfTheFileAndNothingElse) {
  start();
  ASSERT_NE(tier_, nullptr);
  const ModelFile file(folder_, "file", 10'000);
  const FileId id = add(*tier_, file);
  Memory memory(64u << 10);
  const std::vector<ReadRequest> requests{
      request_of(1, {{id, 9'000, 1'000, memory.data(), false}}),
      request_of(2, {{id, 9'000, 1'001, memory.data() + 8192, false}}),
      request_of(3, {{id, 10'000, 1, memory.data() + 16384, false}}),
      request_of(4, {{id, ~std::uint64_t{0} - 5, 100, memory.data() + 16384, false}}),
      request_of(5, {{id, 100, ~std::uint64_t{0} - 50, memory.data() + 16384, false}}),
      request_of(
          6, {{id, 0, 500, memory.data() + 24576, false}, {id, 20'000, 1, memory.data() + 16384, false}})};
  const Outcomes outcomes = run(*tier_, requests);
  EXPECT_EQ(outcomes.at(1), ReadResult::kOk);
  EXPECT_TRUE(file.equal(9'000, memory.data(), 1'000));
  for (std::uint64_t tag = 2; tag <= 6; ++tag) EXPECT_EQ(outcomes.at(tag), ReadResult::kIoError) << tag;
}

TEST_P(SsdTierOf, RequestsOfNothingAreDone) {
  start();
  ASSERT_NE(tier_, nullptr);
  const ModelFile file(folder_, "file", 10'000);
  const FileId id = add(*tier_, file);
  std::byte byte{9};
  EXPECT_EQ(run_one(*tier_, request_of(1, {})), ReadResult::kOk);
  EXPECT_EQ(run_one(*tier_, request_of(2, {{id, 0, 0, &byte, false}})), ReadResult::kOk);
  EXPECT_EQ(byte, std::byte{9});
  EXPECT_EQ(tier_->stats().reads, 0u);
}

TEST_P(SsdTierOf, AcceptsNoMoreThanMaxRequestsUntilSomeArePolled) {
  options_.max_requests = 10;
  start();
  ASSERT_NE(tier_, nullptr);
  const ModelFile file(folder_, "file", 100'000);
  const FileId id = add(*tier_, file);
  Memory memory(32 * kBlock);
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 25; ++i)
    requests.push_back(request_of(i, {{id, i * 3000, 3000, memory.data() + i * kBlock, false}}));
  std::span<const ReadRequest> rest(requests);
  ASSERT_EQ(tier_->submit(rest), 10u);
  rest = rest.subspan(10);
  EXPECT_EQ(tier_->submit(rest), 0u) << "done or not, none has been polled";
  Outcomes outcomes;
  collect(*tier_, 3, outcomes);
  std::size_t n_done = outcomes.size();
  while (n_done < requests.size()) {
    const std::size_t outstanding = requests.size() - rest.size() - n_done;
    const std::size_t n = tier_->submit(rest);
    EXPECT_EQ(n, std::min(rest.size(), 10 - outstanding));
    rest = rest.subspan(n);
    collect(*tier_, 1, outcomes);
    n_done = outcomes.size();
  }
  for (std::uint64_t i = 0; i < 25; ++i) {
    EXPECT_EQ(outcomes.at(i), ReadResult::kOk);
    EXPECT_TRUE(file.equal(i * 3000, memory.data() + i * kBlock, 3000));
  }
}

TEST_P(SsdTierOf, SplitsLongRangesAndCountsReadsAndBytes) {
  options_.max_read_bytes = 64u << 10;
  start();
  ASSERT_NE(tier_, nullptr);
  const ModelFile file(folder_, "file", 1u << 20);
  const FileId id = add(*tier_, file);
  Memory memory(1u << 20);
  ASSERT_EQ(run_one(*tier_, request_of(1, {{id, 0, 1u << 20, memory.data(), true}})), ReadResult::kOk);
  EXPECT_TRUE(file.equal(0, memory.data(), 1u << 20));
  const SsdStats stats = tier_->stats();
  EXPECT_EQ(stats.requests, 1u);
  EXPECT_EQ(stats.reads, 16u);
  EXPECT_EQ(stats.bytes_wanted, 1u << 20);
  EXPECT_EQ(stats.bytes_read, 1u << 20);
  EXPECT_GT(stats.latency_ns_max, 0u);
  EXPECT_EQ(stats.latency_ns_total, stats.latency_ns_max);
  EXPECT_EQ(stats.engine, options_.engine == SsdEngine::kIoUring ? "io_uring" : "pread");
}

TEST_P(SsdTierOf, ReadsIntoAPoolThatClientsMapReadOnlyBeforeAndAfterItIsRegistered) {
  start();
  ASSERT_NE(tier_, nullptr);
  constexpr std::size_t kBytes = 1u << 20;
  const ModelFile file(folder_, "file", kBytes);
  const FileId id = add(*tier_, file);
  const std::unique_ptr<Device> device = make_host_device();
  Result<std::unique_ptr<Pool>> pool = device->create_pool("test", kBytes);
  ASSERT_TRUE(pool) << pool.error().text;
  const std::span<std::byte> slots = (*pool)->host_view();
  tier_->register_region(slots);
  // The region is registered once it was filled, so three rounds see both kinds of read.
  for (int round = 0; round < 3; ++round) {
    std::fill(slots.begin(), slots.end(), std::byte{0});
    std::vector<ReadRequest> requests;
    for (std::uint64_t i = 0; i < 16; ++i)
      requests.push_back(request_of(i, {{id, i << 16, 1u << 16, slots.data() + (i << 16), true}}));
    for (const auto& [tag, result] : run(*tier_, requests)) EXPECT_EQ(result, ReadResult::kOk) << tag;
    EXPECT_TRUE(file.equal(0, slots.data(), kBytes)) << "round " << round;
  }
  tier_->unregister_region(slots);
  pool->reset();
  Memory memory(kBlock);
  EXPECT_EQ(run_one(*tier_, request_of(99, {{id, 0, 100, memory.data(), false}})), ReadResult::kOk);
}

TEST_P(SsdTierOf, ForgetsAFileAndOpensAnotherInItsPlace) {
  start();
  ASSERT_NE(tier_, nullptr);
  const ModelFile a(folder_, "a", 5000, 1), b(folder_, "b", 5000, 2);
  Memory memory(2 * kBlock);
  for (int i = 0; i < 20; ++i) {
    const ModelFile& file = i % 2 == 0 ? a : b;
    const FileId id = add(*tier_, file);
    ASSERT_EQ(run_one(*tier_, request_of(1, {{id, 100, 4000, memory.data(), false}})), ReadResult::kOk);
    EXPECT_TRUE(file.equal(100, memory.data(), 4000));
    tier_->remove_file(id);
  }
}

TEST_P(SsdTierOf, LeavesNoSecondCopyInThePageCache) {
  if (std::get<2>(GetParam()) == Place::kTmpfs) GTEST_SKIP() << "tmpfs is page cache";
  start();
  ASSERT_NE(tier_, nullptr);
  constexpr std::size_t kBytes = 1u << 20;
  const ModelFile file(folder_, "file", kBytes);
  UniqueFd fd = file.open();
  ASSERT_EQ(::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED), 0);
  void* const view = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd.get(), 0);
  ASSERT_NE(view, MAP_FAILED);
  const auto pages_cached = [&] {
    std::vector<unsigned char> pages(kBytes / 4096);
    EXPECT_EQ(::mincore(view, kBytes, pages.data()), 0);
    return std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
  };
  ASSERT_EQ(pages_cached(), 0);
  const FileId id = add(*tier_, file);
  Memory memory(kBytes);
  ASSERT_EQ(run_one(*tier_, request_of(1, {{id, 0, kBytes, memory.data(), true}})), ReadResult::kOk);
  EXPECT_EQ(pages_cached(), 0);
  ASSERT_TRUE(file.equal(0, memory.data(), kBytes));
  char byte = 0;
  ASSERT_EQ(::pread(fd.get(), &byte, 1, 0), 1);
  EXPECT_GT(pages_cached(), 0) << "mincore must see a cached page, or this test shows nothing";
  ::munmap(view, kBytes);
}

INSTANTIATE_TEST_SUITE_P(Setups, SsdTierOf,
                         testing::Combine(testing::Values(SsdEngine::kIoUring, SsdEngine::kPread),
                                          testing::Bool(), testing::Values(Place::kDisk, Place::kTmpfs)),
                         name_of);

TEST(SsdTier, RefusesOptionsOutsideTheirLimitsByName) {
  const auto refused = [](const char* name, const SsdOptions& options) {
    const Result<std::unique_ptr<SsdTier>> tier = make_ssd_tier(options);
    ASSERT_FALSE(tier) << name;
    EXPECT_EQ(tier.error().code, FaultCode::kInvalid);
    EXPECT_NE(tier.error().text.find(name), std::string::npos) << tier.error().text;
  };
  for (const std::uint32_t depth : {0u, 1025u}) {
    SsdOptions options;
    options.queue_depth = depth;
    refused("queue_depth", options);
  }
  for (const std::uint64_t bytes : {std::uint64_t{4095}, std::uint64_t{1} << 40}) {
    SsdOptions options;
    options.max_read_bytes = bytes;
    refused("max_read_bytes", options);
  }
  SsdOptions options;
  options.max_requests = 0;
  refused("max_requests", options);
}

TEST(SsdTier, RefusesWhatIsNotAModelFile) {
  const std::unique_ptr<SsdTier> tier = value_of(make_ssd_tier({}));
  ASSERT_NE(tier, nullptr);
  const Result<FileId> folder = tier->add_file(UniqueFd(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
  ASSERT_FALSE(folder);
  EXPECT_EQ(folder.error().code, FaultCode::kInvalid);
}

TEST(SsdTier, SaysWhetherEveryOpenFileIsReadDirectly) {
  const TempFolder folder;
  const ModelFile file(folder, "file", 10'000);
  SsdOptions options;
  options.direct = false;
  const std::unique_ptr<SsdTier> buffered = value_of(make_ssd_tier(options));
  ASSERT_NE(buffered, nullptr);
  const FileId id = add(*buffered, file);
  EXPECT_EQ(buffered->direct_alignment(id), 0u);
  EXPECT_FALSE(buffered->stats().direct);

  options.direct = true;
  const std::unique_ptr<SsdTier> direct = value_of(make_ssd_tier(options));
  ASSERT_NE(direct, nullptr);
  const FileId other = add(*direct, file);
  EXPECT_EQ(direct->stats().direct, direct->direct_alignment(other) != 0);
  EXPECT_EQ(direct->stats().direct, direct->stats().fallback_reason.find("O_DIRECT") == std::string::npos)
      << direct->stats().fallback_reason;
}

}  // namespace
}  // namespace moecached
