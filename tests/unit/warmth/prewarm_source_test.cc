#include "daemon/warmth/prewarm_source.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstring>

#include "daemon/warmth/hot_list.h"
#include "tests/support/gguf_builder.h"
#include "tests/unit/platform/temp_folder.h"

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr BlockShape kShapes[] = {{.block = 0, .n_experts = 4}};

Result<UseList> read_source(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  return read_prewarm_source(fd.get(), kShapes);
}

TEST(PrewarmSource, TellsFilesApartByHowTheyBegin) {
  const TempFolder folder;
  const std::string path = folder.file("file");
  const std::string csv = "# moecounts-csv v1 {}\nworkload,layer,c0,c1\na,0,1,2\nb,0,1,5\n";
  test::write_file(path, std::as_bytes(std::span(csv)));
  auto list = read_source(path);
  ASSERT_TRUE(list) << list.error().text;
  EXPECT_THAT(list->layers[0].counts, ElementsAre(2, 7, 0, 0));

  test::GgufBuilder imatrix;
  imatrix.tensor("blk.0.ffn_up_exps.weight.counts", 0, {1, 4});
  test::GgufImage image = imatrix.build();
  const float counts[] = {1, 2, 3, 4};
  std::memcpy(image.bytes.data() + image.tensor_offsets.begin()->second, counts, sizeof counts);
  test::write_file(path, image.bytes);
  list = read_source(path);
  ASSERT_TRUE(list) << list.error().text;
  EXPECT_THAT(list->layers[0].counts, ElementsAre(1, 2, 3, 4));

  const std::string hot =
      print_hot_lists(5, "m", {{.label = "x", .layers = {{.block = 0, .counts = {0, 9}}}}});
  test::write_file(path, std::as_bytes(std::span(hot)));
  list = read_source(path);
  ASSERT_TRUE(list) << list.error().text;
  EXPECT_THAT(list->layers[0].counts, ElementsAre(0, 9, 0, 0));
}

TEST(PrewarmSource, RefusesWhatIsNoFileOfCounts) {
  const TempFolder folder;
  const std::string path = folder.file("file");
  EXPECT_EQ(read_small_file(path, 100).error().code, FaultCode::kNotFound);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(read_source(path).error().text, HasSubstr("is not a regular file"));
  EXPECT_THAT(read_small_file(path, 100).error().text, HasSubstr("is not a regular file"));
  std::filesystem::remove(path);
  test::write_file(path, std::as_bytes(std::span("\x28\xb5\x2f\xfd----", 8)));
  EXPECT_THAT(read_source(path).error().text, HasSubstr("zstd -d"));
  test::write_file(path, std::as_bytes(std::span("ab", 2)));
  EXPECT_THAT(read_source(path).error().text, HasSubstr("too short"));
}

}  // namespace
}  // namespace moecached
