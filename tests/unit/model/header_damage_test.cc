// Every byte of a small header damaged, one at a time, and every length cut: never a crash, and never a
// layout that points outside of the file. Runs under the sanitizers as well, where reading beyond a buffer is
// a crash.
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/model/layout_testing.h"

namespace moecached::test {
namespace {

struct Tally {
  std::uint32_t refused = 0;
  std::uint32_t accepted = 0;
};

std::string check(int fd, Tally& tally) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return "fstat";
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  auto layout = read_model_layout(std::span(&fd, 1), {});
  if (!layout) {
    ++tally.refused;
    return layout.error().text.empty() ? "a fault without a text" : "";
  }
  ++tally.accepted;
  return unsound(*layout, std::span(&bytes, 1), 4096);
}

class HeaderDamage : public testing::TestWithParam<bool> {
 protected:
  // Biases and 1 KiB rows: copied and direct parts.
  GgufImage image_ = make_moe({.n_dense_layers = 1,
                               .n_embd = 1024,
                               .gate_type = GetParam() ? 0u : 8u,
                               .fused_gate_up = GetParam(),
                               .biases = true})
                         .build();
};
INSTANTIATE_TEST_SUITE_P(Fused, HeaderDamage, testing::Bool());

TEST_P(HeaderDamage, AnyByteChangedGivesAFaultOrALayoutInsideTheFile) {
  const UniqueFd fd = memory_file(image_.bytes);
  Tally tally;
  ASSERT_EQ(check(fd.get(), tally), "");
  ASSERT_EQ(tally.accepted, 1u);
  for (std::size_t at = 0; at < image_.data_offset; ++at) {
    const std::byte was = image_.bytes[at];
    for (const std::byte now : {std::byte{0}, std::byte{0xff}, was ^ std::byte{1}, was ^ std::byte{0x80}}) {
      ASSERT_EQ(::pwrite(fd.get(), &now, 1, static_cast<off_t>(at)), 1);
      ASSERT_EQ(check(fd.get(), tally), "") << "byte " << at << " set to " << static_cast<int>(now);
    }
    ASSERT_EQ(::pwrite(fd.get(), &was, 1, static_cast<off_t>(at)), 1);
  }
  // Damage to names of unrelated keys and tensors is harmless; damage to sizes is not. Both must have
  // happened.
  EXPECT_GT(tally.refused, image_.data_offset / 2);
  EXPECT_GT(tally.accepted, image_.data_offset / 2);
}

TEST_P(HeaderDamage, AnyEightBytesChangedGiveAFaultOrALayoutInsideTheFile) {
  const UniqueFd fd = memory_file(image_.bytes);
  Tally tally;
  for (std::size_t at = 0; at + 8 <= image_.data_offset; ++at) {
    for (const std::uint64_t now : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{1} << 63,
                                    std::uint64_t{1} << 32, ~std::uint64_t{0} - image_.bytes.size()}) {
      ASSERT_EQ(::pwrite(fd.get(), &now, 8, static_cast<off_t>(at)), 8);
      ASSERT_EQ(check(fd.get(), tally), "") << "bytes at " << at << " set to " << now;
    }
    ASSERT_EQ(::pwrite(fd.get(), &image_.bytes[at], 8, static_cast<off_t>(at)), 8);
  }
  EXPECT_GT(tally.refused, image_.data_offset);
}

TEST_P(HeaderDamage, AFileCutAnywhereBeforeTheEndOfItsLastTensorIsRefused) {
  std::size_t end = 0;
  auto file = read_image(image_);
  ASSERT_TRUE(file);
  for (const GgufTensor& tensor : file->tensors)
    end = std::max(end, static_cast<std::size_t>(tensor.offset + tensor.bytes));
  const UniqueFd fd = memory_file(image_.bytes);
  Tally tally;
  // Every length through the header and at the end; strides through the data between them.
  for (std::size_t bytes = end; bytes-- > 0;) {
    constexpr std::size_t kStride = 997;
    if (bytes + 64 < end && bytes > image_.data_offset + kStride) bytes -= kStride;
    ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    ASSERT_EQ(check(fd.get(), tally), "") << bytes << " bytes left";
    ASSERT_EQ(tally.accepted, 0u) << bytes << " bytes left";
  }
  EXPECT_GT(tally.refused, image_.data_offset);
}

}  // namespace
}  // namespace moecached::test
