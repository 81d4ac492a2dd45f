#include "daemon/warmth/state_directory.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <fstream>

#include "tests/unit/platform/temp_folder.h"

namespace moecached {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<UseList> lists() { return {{.label = "a", .layers = {{.block = 0, .counts = {1, 2}}}}}; }

TEST(StateDirectory, KeepsListsOfEachModel) {
  const TempFolder folder;
  auto state = StateDirectory::open(folder.file("state/moecached"));
  ASSERT_TRUE(state) << state.error().text;
  EXPECT_THAT(*state->load(1), IsEmpty());
  ASSERT_TRUE(state->save(1, "m", lists()));
  ASSERT_TRUE(state->save(1, "m", lists()));
  const auto loaded = state->load(1);
  ASSERT_TRUE(loaded) << loaded.error().text;
  EXPECT_THAT(loaded->at(0).layers[0].counts, ElementsAre(1, 2));
  EXPECT_THAT(*state->load(2), IsEmpty());
  struct stat status {};
  ASSERT_EQ(::stat(folder.file("state/moecached").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST(StateDirectory, RefusesForeignAndDamagedFiles) {
  const TempFolder folder;
  auto state = StateDirectory::open(folder.file("s"));
  ASSERT_TRUE(state->save(1, "m", lists()));
  std::filesystem::copy_file(state->path_of(1), state->path_of(2));
  EXPECT_THAT(state->load(2).error().text, HasSubstr("another model's"));
  std::filesystem::resize_file(state->path_of(1), std::filesystem::file_size(state->path_of(1)) - 20);
  EXPECT_THAT(state->load(1).error().text, HasSubstr("line"));
  std::ofstream(state->path_of(1), std::ios::trunc);
  EXPECT_FALSE(state->load(1));
}

TEST(StateDirectory, RemovesTheOldestFilesBeyondItsLimit) {
  const TempFolder folder;
  auto state = StateDirectory::open(folder.file("s"));
  for (std::uint64_t key = 0; key < StateDirectory::kFilesMax; ++key)
    ASSERT_TRUE(state->save(key, "m", lists()));
  std::filesystem::last_write_time(state->path_of(7),
                                   std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  ASSERT_TRUE(state->save(1000, "m", lists()));
  EXPECT_THAT(*state->load(7), IsEmpty());
  EXPECT_FALSE(state->load(1000)->empty());
  EXPECT_FALSE(state->load(8)->empty());
}

}  // namespace
}  // namespace moecached
