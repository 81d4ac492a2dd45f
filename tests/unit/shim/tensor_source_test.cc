#include "shim/ggml/tensor_source.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "tests/unit/shim/mini_host.h"

namespace moecached::shim {
namespace {

constexpr const char* kMaps =
    "55d0a0000000-55d0a0001000 r--p 00000000 fe:00 10                         /usr/bin/host\n"
    "7f0000000000-7f0000010000 r--s 00002000 fe:00 42                         /models/a b.gguf\n"
    "7f0000010000-7f0000020000 rw-p 00000000 00:00 0\n"
    "7f0000020000-7f0000030000 r--s 00000000 fe:00 43                         /models/gone.gguf (deleted)\n"
    "7f0000030000-7f0000040000 r--s 00000000 fe:00 44                         /models/two\\012lines.gguf\n"
    "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]\n";

TEST(TensorSource, AddsTheOffsetInTheMappingToThatOfTheMapping) {
  const auto source = source_in_maps(kMaps, 0x7f0000000123);
  ASSERT_TRUE(source);
  EXPECT_EQ(source->path, "/models/a b.gguf");
  EXPECT_EQ(source->offset, 0x2123u);
}

TEST(TensorSource, ReadsNewlinesInPathsAsTheKernelWritesThem) {
  EXPECT_EQ(source_in_maps(kMaps, 0x7f0000030000)->path, "/models/two\nlines.gguf");
}

TEST(TensorSource, IsUnknownForMemoryDeletedFilesAndGaps) {
  EXPECT_FALSE(source_in_maps(kMaps, 0x7f0000010000));
  EXPECT_FALSE(source_in_maps(kMaps, 0x7f0000020000)) << "the name may lead to another file by now";
  EXPECT_FALSE(source_in_maps(kMaps, 0x7f0000040000));
  EXPECT_FALSE(source_in_maps(kMaps, 0x7ffc00000000));
  EXPECT_FALSE(source_in_maps("", 0x1000));
}

TEST(TensorSource, FindsAMappingOfThisProcess) {
  testing::TemporaryFolder folder;
  const std::string path = folder.file("data");
  std::ofstream(path) << std::string(9000, 'x');
  const testing::MappedFile mapped(path);
  const auto source = source_of_mapped(mapped.data() + 8192);
  ASSERT_TRUE(source);
  EXPECT_EQ(source->path, path);
  EXPECT_EQ(source->offset, 8192u);
}

class OpenFilesTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kOffset = 64;
  void SetUp() override {
    bytes_.resize(100000);
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i * 31 >> 3);
    std::ofstream(path_, std::ios::binary) << "GGUF" << std::string(kOffset - 4, '.') << bytes_;
    testing::install_mini_host({{"blk.0.ffn_up_exps.weight", kOffset, bytes_.size()}});
    fd_ = open(path_.c_str(), O_RDONLY);
  }
  void TearDown() override { close(fd_); }
  auto find(const std::string& data) {
    return source_in_open_files("blk.0.ffn_up_exps.weight", data.data(), data.size());
  }

  testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("model.gguf");
  std::string bytes_;
  int fd_ = -1;
};

TEST_F(OpenFilesTest, FindsATensorByNameAndBytes) {
  const auto source = find(bytes_);
  ASSERT_TRUE(source);
  EXPECT_EQ(source->path, path_);
  EXPECT_EQ(source->offset, kOffset);
}

TEST_F(OpenFilesTest, RefusesAnEqualNameWithOtherBytes) {
  for (const std::size_t at : {std::size_t{0}, bytes_.size() - 1}) {
    std::string other = bytes_;
    other[at] ^= 1;
    EXPECT_FALSE(find(other)) << "the byte at " << at << " differs";
  }
  EXPECT_FALSE(find(bytes_.substr(1)));
}

TEST_F(OpenFilesTest, KnowsOnlyFilesThatAreOpen) {
  close(fd_);
  EXPECT_FALSE(find(bytes_));
  fd_ = open("/dev/null", O_RDONLY);
}

TEST(ShardPaths, ListsAllShardsInOrder) {
  EXPECT_EQ(shard_paths("/m/a-00002-of-00003.gguf"),
            (std::vector<std::string>{"/m/a-00001-of-00003.gguf", "/m/a-00002-of-00003.gguf",
                                      "/m/a-00003-of-00003.gguf"}));
}

TEST(ShardPaths, TakesOtherNamesForWholeModels) {
  for (const char* path :
       {"/m/a.gguf", "-00001-of-00003.gguf", "/m/a-00001-of-00003.bin", "/m/a-00004-of-00003.gguf",
        "/m/a-00000-of-00000.gguf", "/m/a-0000x-of-00003.gguf", "/m/a_00001-of-00003.gguf"}) {
    EXPECT_EQ(shard_paths(path), std::vector<std::string>{path});
  }
}

}  // namespace
}  // namespace moecached::shim
