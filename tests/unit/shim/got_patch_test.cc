#include "shim/ggml/got_patch.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <fstream>
#include <string>

#include "tests/unit/shim/import_probe.h"
#include "tests/unit/shim/mini_host.h"

namespace moecached::shim {
namespace {

int g_advised = 0;
int counting_advise(void*, std::size_t, int) {
  ++g_advised;
  return 4711;
}

class GotPatchTest : public ::testing::TestWithParam<const char*> {};

TEST_P(GotPatchTest, RedirectsCallsOfOtherObjectsAndLeavesOtherSymbolsAlone) {
  const testing::ImportProbe probe(GetParam());
  int own = 0;
  ASSERT_NE(probe.advise(&own, 0, POSIX_MADV_NORMAL), 4711);
  const Replacement replacement[] = {{"posix_madvise", reinterpret_cast<void*>(counting_advise)}};
  EXPECT_GE(patch_imports(replacement), 1u);
  const int before = g_advised;
  EXPECT_EQ(probe.advise(&own, 0, POSIX_MADV_NORMAL), 4711);
  EXPECT_EQ(g_advised, before + 1);
  void* mapped = probe.map(4096, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  EXPECT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(probe.unmap(mapped, 4096), 0);
  // Back, for the other tests of this program.
  const Replacement restored[] = {{"posix_madvise", reinterpret_cast<void*>(posix_madvise)}};
  patch_imports(restored);
  EXPECT_NE(probe.advise(&own, 0, POSIX_MADV_NORMAL), 4711);
}

INSTANTIATE_TEST_SUITE_P(Bindings, GotPatchTest, ::testing::Values(IMPORT_PROBE_NOW, IMPORT_PROBE_LAZY));

TEST(GotPatch, LeavesOwnCallsAlone) {
  const Replacement replacement[] = {{"posix_madvise", reinterpret_cast<void*>(counting_advise)}};
  patch_imports(replacement);
  int own = 0;
  EXPECT_NE(posix_madvise(&own, 0, POSIX_MADV_NORMAL), 4711) << "the hook's own call would come back to it";
  const Replacement restored[] = {{"posix_madvise", reinterpret_cast<void*>(posix_madvise)}};
  patch_imports(restored);
}

TEST(GotPatch, ReportsThatNothingImportsASymbol) {
  const Replacement replacement[] = {
      {"moecached_no_such_function", reinterpret_cast<void*>(counting_advise)}};
  EXPECT_EQ(patch_imports(replacement), 0u);
}

// The slot of a symbol in an object bound at load time lies behind RELRO.
TEST(GotPatch, SealsReadOnlyTablesAgain) {
  const testing::ImportProbe probe(IMPORT_PROBE_NOW);
  const Replacement replacement[] = {{"posix_madvise", reinterpret_cast<void*>(counting_advise)}};
  patch_imports(replacement);
  const Replacement restored[] = {{"posix_madvise", reinterpret_cast<void*>(posix_madvise)}};
  patch_imports(restored);
  std::ifstream maps("/proc/self/maps");
  int read_only = 0;
  int writable = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("shim_import_probe_now") == std::string::npos) continue;
    read_only += line.find(" r--p ") != std::string::npos;
    writable += line.find(" rw-p ") != std::string::npos;
  }
  EXPECT_GE(read_only, 1);
  EXPECT_LE(writable, 1) << "only .data may be writable";
  EXPECT_EQ(testing::permissions_at(reinterpret_cast<void*>(probe.advise)), "r-xp");
}

}  // namespace
}  // namespace moecached::shim
