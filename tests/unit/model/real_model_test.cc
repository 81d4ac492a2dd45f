// The model that the repository carries, against facts taken from it with other programs than ours.
#include <fcntl.h>
#include <sys/stat.h>

#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

constexpr const char* kPath = MOECACHED_TEST_DATA "/tinymoe-53m-a8m-q4_k_m.gguf";
constexpr std::uint32_t kQ4K = 12;
constexpr std::uint32_t kQ6K = 14;

struct Known {
  std::uint64_t gate_offset, up_offset, down_offset;
  std::uint32_t down_type;
};
constexpr Known kBlocks[] = {
    {3838464, 5051904, 2118144, kQ6K},    {7523328, 8736768, 6343680, kQ4K},
    {11208192, 12421632, 10028544, kQ4K}, {15442176, 16655616, 13721856, kQ6K},
    {19127040, 20340480, 17947392, kQ4K}, {22811904, 24025344, 21632256, kQ4K},
    {27045888, 28259328, 25325568, kQ6K}, {31279872, 32493312, 29559552, kQ6K},
};

class RealModel : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(fd_) << "open " << kPath; }
  Result<ModelLayout> layout(std::uint32_t alignment) const {
    const int fd = fd_.get();
    return read_model_layout(std::span(&fd, 1), {.direct_alignment = alignment});
  }

  UniqueFd fd_{::open(kPath, O_RDONLY | O_CLOEXEC)};
};

TEST_F(RealModel, EveryPartLiesWhereItIsKnownToLie) {
  auto got = layout(4096);
  ASSERT_TRUE(got) << got.error().text;
  EXPECT_EQ(got->architecture, "qwen3moe");
  EXPECT_EQ(got->n_expert_used, 4u);
  EXPECT_EQ(got->expert_bytes_total, 30474240u);
  EXPECT_TRUE(got->left_out.empty());
  ASSERT_EQ(got->layers.size(), std::size(kBlocks));
  for (std::size_t i = 0; i < got->layers.size(); ++i) {
    const LayerLayout& layer = got->layers[i];
    const Known& known = kBlocks[i];
    EXPECT_EQ(layer.block, i);
    EXPECT_EQ(layer.n_experts, 32u);
    ASSERT_EQ(layer.parts.size(), 3u);
    EXPECT_EQ(layer.parts[0].file_offset, known.gate_offset);
    EXPECT_EQ(layer.parts[1].file_offset, known.up_offset);
    EXPECT_EQ(layer.parts[2].file_offset, known.down_offset);
    EXPECT_EQ(layer.parts[0].ggml_type, kQ4K);
    EXPECT_EQ(layer.parts[1].ggml_type, kQ4K);
    EXPECT_EQ(layer.parts[2].ggml_type, known.down_type);
    EXPECT_EQ(layer.parts[0].expert_bytes, 36864u);
    EXPECT_EQ(layer.parts[2].expert_bytes, known.down_type == kQ6K ? 53760u : 36864u);
    EXPECT_EQ(layer.slot_class, known.down_type == kQ6K ? 0u : 1u);
    for (const PartLayout& part : layer.parts) {
      EXPECT_EQ(part.ne0, 256u);
      EXPECT_EQ(part.ne1, 256u);
      EXPECT_EQ(part.direct, part.ggml_type == kQ4K);  // 36864 is a multiple of 4096, 53760 is not
    }
  }
}

TEST_F(RealModel, ItsLayoutIsSoundForEveryAlignment) {
  struct stat status {};
  ASSERT_EQ(::fstat(fd_.get(), &status), 0);
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  for (const std::uint32_t alignment : {0u, 512u, 4096u, 16384u}) {
    auto got = layout(alignment);
    ASSERT_TRUE(got) << got.error().text;
    EXPECT_EQ(unsound(*got, std::span(&bytes, 1), alignment), "") << alignment;
  }
}

TEST_F(RealModel, PaddingOfRecordsStaysBelowATenth) {
  auto got = layout(4096);
  ASSERT_TRUE(got) << got.error().text;
  std::uint64_t record_bytes = 0;
  for (const LayerLayout& layer : got->layers) record_bytes += layer.slot_stride * layer.n_experts;
  EXPECT_LT(record_bytes, got->expert_bytes_total / 10 * 11);
}

}  // namespace
}  // namespace moecached::test
