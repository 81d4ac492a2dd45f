// What goes wrong under way: errors of the disk, short and interrupted reads, files that change, and the end
// of the tier.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <vector>

#include "tests/unit/tier/tier_support.h"

namespace moecached {
namespace {

class SsdTierFaults : public testing::TestWithParam<SsdEngine> {
 protected:
  void SetUp() override {
    if (GetParam() == SsdEngine::kIoUring && !has_io_uring()) GTEST_SKIP() << "io_uring is refused here";
    options_.engine = GetParam();
  }
  void start() {
    tier_ = value_of(make_ssd_tier_over(options_, hooked(hooks_)));
    ASSERT_NE(tier_, nullptr);
    id_ = add(*tier_, file_);
  }
  // One staged part of 1000 bytes.
  ReadRequest small(std::uint64_t tag, std::uint64_t offset) {
    return request_of(tag, {{id_, offset, 1000, memory_.data() + tag * kBlock, false}});
  }
  bool arrived(std::uint64_t tag, std::uint64_t offset) {
    return file_.equal(offset, memory_.data() + tag * kBlock, 1000);
  }

  SsdOptions options_;
  EngineHooks hooks_;  // outlives tier_
  TempFolder folder_;
  ModelFile file_{folder_, "model", 1'000'000};
  Memory memory_{1u << 20};
  std::unique_ptr<SsdTier> tier_;
  FileId id_;
};

TEST_P(SsdTierFaults, AnErrorOfTheDiskFailsTheRequestsThatWantThatBlockAndNoOther) {
  // Bytes 100'000 to 101'000 cannot be read, alone or as part of a longer read.
  hooks_.instead = [](const EngineRead& read) {
    return read.offset < 101'000 && read.offset + read.bytes > 100'000 ? -EIO : 0;
  };
  start();
  const std::vector<ReadRequest> requests{small(1, 90'000), small(2, 100'100), small(3, 110'000)};
  Outcomes outcomes = run(*tier_, requests);
  EXPECT_EQ(outcomes.at(1), ReadResult::kOk);
  EXPECT_EQ(outcomes.at(2), ReadResult::kIoError);
  EXPECT_EQ(outcomes.at(3), ReadResult::kOk);
  EXPECT_TRUE(arrived(1, 90'000));
  EXPECT_TRUE(arrived(3, 110'000));
  EXPECT_GE(tier_->stats().errors, 1u);
  hooks_.instead = nullptr;
  EXPECT_EQ(run_one(*tier_, small(2, 100'100)), ReadResult::kOk) << "the next try is a new one";
  EXPECT_TRUE(arrived(2, 100'100));
}

TEST_P(SsdTierFaults, AnErrorInAReadOfSeveralIsTriedAgainForEach) {
  // 150'000 and its block are bad; the three requests are neighbours, so one read at first.
  hooks_.instead = [](const EngineRead& read) {
    return read.offset <= 150'000 && read.offset + read.bytes > 150'000 ? -EIO : 0;
  };
  options_.direct = true;
  start();
  const std::uint64_t block = 150'000 / kBlock * kBlock;
  const std::vector<ReadRequest> requests{
      small(1, block - 1000), request_of(2, {{id_, block, kBlock, memory_.data() + 2 * kBlock + 1, false}}),
      small(4, block + kBlock)};
  const Outcomes outcomes = run(*tier_, requests);
  EXPECT_EQ(outcomes.at(1), ReadResult::kOk);
  EXPECT_EQ(outcomes.at(2), ReadResult::kIoError);
  EXPECT_EQ(outcomes.at(4), ReadResult::kOk);
  EXPECT_EQ(tier_->stats().reads, tier_->direct_alignment(id_) == 0 ? 3u : 4u)
      << "one for all, then one for each";
  EXPECT_TRUE(arrived(1, block - 1000));
  EXPECT_TRUE(arrived(4, block + kBlock));
}

TEST_P(SsdTierFaults, AFailedRequestIsReportedOnceAllOfItsReadsHaveEnded) {
  options_.max_read_bytes = 4096;
  options_.queue_depth = 4;
  std::atomic<int> n_in_flight{0};
  hooks_.before = [&](EngineRead&) { ++n_in_flight; };
  hooks_.after = [&](const EngineRead& read, std::int32_t& result) {
    --n_in_flight;
    if (read.offset < 4096) result = -EIO;  // the first of many
  };
  start();
  EXPECT_EQ(run_one(*tier_, request_of(1, {{id_, 0, 200'000, memory_.data(), true}})), ReadResult::kIoError);
  EXPECT_EQ(n_in_flight.load(), 0);
}

TEST_P(SsdTierFaults, ShortReadsAreContinued) {
  std::atomic<int> n_reads{0};
  hooks_.before = [&](EngineRead& read) {
    ++n_reads;
    if (read.bytes > 3 * kBlock) read.bytes = 2 * kBlock;  // as if the kernel had stopped there
  };
  start();
  for (const bool direct : {true, false}) {
    Memory memory(300'000);
    std::byte* const destination = memory.data() + (direct ? 500 : 1);
    ASSERT_EQ(run_one(*tier_, request_of(1, {{id_, 500, 200'000, destination, direct}})), ReadResult::kOk);
    EXPECT_TRUE(file_.equal(500, destination, 200'000));
  }
  EXPECT_GT(n_reads.load(), 30);
}

TEST_P(SsdTierFaults, AShortReadThatEndsWithinABlockGoesOnAtTheBlock) {
  hooks_.after = [](const EngineRead& read, std::int32_t& result) {
    if (read.bytes > 2 * kBlock && result > static_cast<std::int32_t>(kBlock)) result = kBlock + 77;
  };
  start();
  for (const bool direct : {true, false}) {
    Memory memory(100'000);
    std::byte* const destination = memory.data() + (direct ? 0 : 1);
    ASSERT_EQ(run_one(*tier_, request_of(1, {{id_, 0, 50'000, destination, direct}})), ReadResult::kOk);
    EXPECT_TRUE(file_.equal(0, destination, 50'000));
  }
}

TEST_P(SsdTierFaults, InterruptedReadsAreTriedAgain) {
  std::atomic<int> n{0};
  hooks_.instead = [&](const EngineRead&) {
    const int i = n++;
    return i % 3 == 0 ? -EINTR : i % 3 == 1 ? -EAGAIN : 0;
  };
  start();
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 20; ++i) requests.push_back(small(i, i * 50'000));
  for (const auto& [tag, result] : run(*tier_, requests)) {
    EXPECT_EQ(result, ReadResult::kOk);
    EXPECT_TRUE(arrived(tag, tag * 50'000));
  }
}

TEST_P(SsdTierFaults, AReadThatIsAlwaysInterruptedOrAlwaysEmptyFailsInTheEnd) {
  for (const std::int32_t result : {-EINTR, -EAGAIN, 1}) {
    // 1: a byte, and never a block, though the wanted bytes are further on.
    hooks_.instead = [result](const EngineRead&) { return result; };
    start();
    EXPECT_EQ(run_one(*tier_, small(1, 600)),
              tier_->direct_alignment(id_) == 0 && result == 1 ? ReadResult::kOk : ReadResult::kIoError)
        << result;
    tier_.reset();
  }
}

TEST_P(SsdTierFaults, AFileTouchedAfterItsBytesArrivedIsChanged) {
  std::atomic<bool> touch{false};
  hooks_.after = [&](const EngineRead&, std::int32_t&) {
    if (touch.exchange(false)) file_.touch();
  };
  start();
  EXPECT_EQ(run_one(*tier_, small(1, 0)), ReadResult::kOk);
  touch = true;
  EXPECT_EQ(run_one(*tier_, small(2, 0)), ReadResult::kFileChanged);
  const std::uint64_t n_reads = tier_->stats().reads;
  EXPECT_EQ(run_one(*tier_, small(3, 0)), ReadResult::kFileChanged);
  EXPECT_EQ(tier_->stats().reads, n_reads) << "a changed file is not read at all";
}

TEST_P(SsdTierFaults, AFileTruncatedUnderWayIsChanged) {
  hooks_.before = [&](EngineRead&) { EXPECT_EQ(::truncate(file_.path().c_str(), 10), 0); };
  start();
  EXPECT_EQ(run_one(*tier_, request_of(1, {{id_, 0, 500'000, memory_.data(), true}})),
            ReadResult::kFileChanged);
}

TEST_P(SsdTierFaults, OneChangedFileDoesNotDisturbAnother) {
  start();
  const ModelFile other(folder_, "other", 100'000, 5);
  const FileId other_id = add(*tier_, other);
  file_.touch();
  const std::vector<ReadRequest> requests{
      small(1, 0), request_of(2, {{other_id, 0, 1000, memory_.data() + 2 * kBlock, false}}),
      request_of(3, {{other_id, 0, 1000, memory_.data() + 3 * kBlock, false},
                     {id_, 0, 1000, memory_.data() + 4 * kBlock, false}})};
  const Outcomes outcomes = run(*tier_, requests);
  EXPECT_EQ(outcomes.at(1), ReadResult::kFileChanged);
  EXPECT_EQ(outcomes.at(2), ReadResult::kOk);
  EXPECT_TRUE(other.equal(0, memory_.data() + 2 * kBlock, 1000));
  EXPECT_EQ(outcomes.at(3), ReadResult::kFileChanged);
}

TEST_P(SsdTierFaults, AFileReplacedByRenamingIsStillTheOneThatWasOpened) {
  start();
  const ModelFile replacement(folder_, "new", 1'000'000, 77);
  std::filesystem::rename(replacement.path(), file_.path());
  EXPECT_EQ(run_one(*tier_, small(1, 5000)), ReadResult::kOk);
  EXPECT_TRUE(arrived(1, 5000));
}

TEST_P(SsdTierFaults, TheTierEndsOnlyWhenNothingIsInFlight) {
  std::promise<void> first_started;
  std::atomic<bool> told{false};
  std::atomic<std::uint64_t> n_in_flight_at_end{99};
  hooks_.before = [&](EngineRead&) {
    if (!told.exchange(true)) first_started.set_value();
  };
  hooks_.on_destruction = [&](std::size_t n) { n_in_flight_at_end = n; };
  options_.max_read_bytes = 4096;
  start();
  std::vector<ReadRequest> requests;
  for (std::uint64_t i = 0; i < 4; ++i)
    requests.push_back(request_of(i, {{id_, 0, 250'000, memory_.data() + i * 262'144, true}}));
  ASSERT_EQ(tier_->submit(requests), 4u);
  first_started.get_future().wait();
  tier_.reset();
  EXPECT_EQ(n_in_flight_at_end.load(), 0u);
}

TEST_P(SsdTierFaults, TheTierEndsWithRequestsThatNobodyPolled) {
  start();
  const std::vector<ReadRequest> requests{small(1, 0), small(2, 500'000)};
  ASSERT_EQ(tier_->submit(requests), 2u);
  tier_.reset();
}

INSTANTIATE_TEST_SUITE_P(Engines, SsdTierFaults, testing::Values(SsdEngine::kIoUring, SsdEngine::kPread),
                         [](const auto& instance) {
                           return instance.param == SsdEngine::kIoUring ? "IoUring" : "Pread";
                         });

}  // namespace
}  // namespace moecached
