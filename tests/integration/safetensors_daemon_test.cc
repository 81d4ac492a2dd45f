// Models as safetensors, the real client against the real daemon: every byte of every slot is the files',
// however the experts lie in them, while they are swapped, streamed, or read by the client alone.
#include <algorithm>
#include <fstream>

#include "tests/integration/client_daemon_fixture.h"
#include "tests/support/safetensors_builder.h"

namespace moecached {
namespace {

struct Case {
  const char* name;
  test::HfSpec spec;
};

class SafetensorsDaemonTest : public ClientDaemonTest, public ::testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    ClientDaemonTest::SetUp();
    std::filesystem::create_directory(folder_ / "Tiny-MoE");
    for (const auto& content : test::make_hf(GetParam().spec).files()) {
      files_.push_back(folder_ / "Tiny-MoE" / (std::to_string(files_.size()) + ".safetensors"));
      test::write_file(files_.back(), content);
    }
  }
  std::vector<std::filesystem::path> files_;
};

constexpr test::HfSpec spec_of(test::ExpertNames names, std::uint64_t inner, std::uint32_t n_shards) {
  return {.names = names,
          .n_layers = 3,
          .n_experts = kExperts,
          .n_expert_used = kTopK,
          .inner = inner,
          .n_shards = n_shards};
}

// Inner sizes of 64 make experts of 16 KiB, which are read in place where phases agree; 33 rows are copied.
INSTANTIATE_TEST_SUITE_P(Layouts, SafetensorsDaemonTest,
                         ::testing::Values(Case{"one_file", spec_of(test::ExpertNames::kProjections, 64, 1)},
                                           Case{"shards", spec_of(test::ExpertNames::kProjections, 64, 3)},
                                           Case{"copied", spec_of(test::ExpertNames::kMixtral, 33, 2)},
                                           Case{"fused", spec_of(test::ExpertNames::kFused, 64, 2)}),
                         [](const auto& one) { return one.param.name; });

TEST_P(SafetensorsDaemonTest, EverySlotHoldsItsExpertWhileTheyAreSwapped) {
  Client client(folder_, files_), other(folder_, files_);
  EXPECT_EQ(client.decode(1, 100) + other.decode(2, 100), 0u);
  EXPECT_EQ(client.counters().fallback_reads + other.counters().fallback_reads, 0u);
  EXPECT_GT(client.counters().leases, 0u);
  ASSERT_EQ(daemon_->models().size(), 1u) << "one model for both";
  EXPECT_EQ(daemon_->models().front().name, "Tiny-MoE");

  std::int32_t ids[] = {3}, slots[] = {-1};
  ASSERT_EQ(moecached_lane_resolve(client.lane(), 1, ids, 1, 1, 0, slots), MOECACHED_OK);
  EXPECT_GT(client.wrong_bytes(1, 4, slots[0]), 0u) << "the comparison can tell experts apart";
}

TEST_P(SafetensorsDaemonTest, AClientOnItsOwnReadsTheRightBytes) {
  Client client(folder_, files_);
  EXPECT_EQ(client.decode(1, 2), 0u);
  daemon_.reset();
  EXPECT_EQ(client.decode(3, 30), 0u);
  EXPECT_GT(client.counters().fallback_reads, 0u);
}

TEST_P(SafetensorsDaemonTest, StreamedPartsAreTheFiles) {
  Client client(folder_, files_);
  moecached_part_info part{};
  ASSERT_EQ(moecached_model_part(client.model(), 2, 0, &part), MOECACHED_OK);
  const std::int32_t experts[] = {15, 0, 7};
  ASSERT_GE(moecached_stream_capacity(client.lane(), 2, 0), 3u);
  ASSERT_EQ(moecached_stream_begin(client.lane(), 2, 0, experts, 3, 0), MOECACHED_OK);
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(client.lane(), 0, &data), MOECACHED_OK) << moecached_last_error();
  for (std::size_t i = 0; i < 3; ++i) {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;
    ASSERT_EQ(
        moecached_model_locate(client.model(), 2, 0, static_cast<std::uint32_t>(experts[i]), &file, &offset),
        MOECACHED_OK);
    std::vector<char> expected(part.expert_bytes);
    std::ifstream stream(files_[file], std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    stream.read(expected.data(), static_cast<std::streamsize>(expected.size()));
    ASSERT_TRUE(stream);
    const char* const got = static_cast<const char*>(data) + i * part.expert_bytes;
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), got)) << experts[i];
  }
  EXPECT_EQ(client.counters().fallback_reads, 0u);
}

TEST_P(SafetensorsDaemonTest, ARefusedModelSaysWhy) {
  moecached_session* session = nullptr;
  moecached_model* model = nullptr;
  ASSERT_EQ(moecached_session_open((folder_ / "handle.sock").c_str(), "test", &session), MOECACHED_OK);
  const char* alone = files_[0].c_str();
  EXPECT_EQ(moecached_model_open(session, &alone, 1, &model), MOECACHED_E_REFUSED);
  EXPECT_NE(std::string(moecached_last_error()).find("config.json"), std::string::npos)
      << moecached_last_error();
  moecached_session_close(session);
}

// As many files as the largest models come in; their descriptors go in one message.
TEST_F(ClientDaemonTest, AModelOfManyShardsIsOpened) {
  const test::HfSpec spec = {.n_layers = 3, .n_experts = kExperts, .n_expert_used = kTopK, .n_shards = 150};
  std::vector<std::filesystem::path> files;
  for (const auto& content : test::make_hf(spec).files()) {
    files.push_back(folder_ / ("file-" + std::to_string(files.size())));
    test::write_file(files.back(), content);
  }
  ASSERT_EQ(files.size(), 152u);
  Client client(folder_, files);
  EXPECT_EQ(client.decode(1, 10), 0u);
  EXPECT_EQ(client.counters().fallback_reads, 0u);
}

}  // namespace
}  // namespace moecached
