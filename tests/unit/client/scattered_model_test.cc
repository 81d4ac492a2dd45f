// Models whose experts lie apart in their files: what this process reads by itself comes from the right
// places, and places outside of the files are refused.
#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

constexpr std::uint32_t kExperts = 16;

class ScatteredModel : public ClientTest {
 protected:
  ScatteredModel() : ClientTest({.scattered = true}) {}
};

TEST_F(ScatteredModel, EveryExpertIsLocated) {
  open_all();
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    for (std::uint32_t part = 0; part < 3; ++part) {
      for (std::uint32_t expert = 0; expert < kExperts; ++expert) {
        std::uint32_t file = 99;
        std::uint64_t offset = 0;
        ASSERT_EQ(moecached_model_locate(model_, layer, part, expert, &file, &offset), MOECACHED_OK);
        EXPECT_EQ(file, model_file_.file_of(layer));
        EXPECT_EQ(offset, model_file_.expert_offset(layer, part, expert));
      }
    }
  }
  std::uint32_t file = 0;
  std::uint64_t offset = 0;
  EXPECT_EQ(moecached_model_locate(model_, 0, 0, kExperts, &file, &offset), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_model_locate(model_, 0, 3, 0, &file, &offset), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_model_locate(model_, 3, 0, 0, &file, &offset), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_model_locate(model_, 0, 0, 0, nullptr, &offset), MOECACHED_E_ARGUMENT);
}

TEST_F(ScatteredModel, WhatTheDaemonCannotServeComesFromTheRightPlaces) {
  open_all();
  daemon_->on_lease(OnRequest::kIoError);
  ASSERT_EQ(resolve(1, {0, 5, 15}), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(slots_hold(1, {0, 5, 15}));
  EXPECT_EQ(counters().fallback_reads, 3u);

  daemon_->on_stream(OnRequest::kIoError);
  const std::int32_t experts[] = {3, 9};
  ASSERT_EQ(moecached_stream_begin(lane_, 2, 1, experts, 2, 0), MOECACHED_OK);
  const void* data = nullptr;
  ASSERT_EQ(moecached_stream_wait(lane_, 0, &data), MOECACHED_OK) << moecached_last_error();
  EXPECT_TRUE(model_file_.part_is(2, 1, 3, data));
  EXPECT_TRUE(model_file_.part_is(2, 1, 9, static_cast<const std::byte*>(data) + 521));
  EXPECT_EQ(counters().fallback_reads, 5u);
}

TEST_F(ScatteredModel, ARestartedDaemonMustFindTheSamePlaces) {
  open_all();
  daemon_.reset();
  start_daemon({.boot_epoch = 2, .spoil_model = [](ModelSegmentView view) { view.extents[7].offset += 1; }});
  EXPECT_NE(moecached_session_reconnect(session_), MOECACHED_OK);
}

using Spoil = std::function<void(ModelSegmentView)>;
struct Lie {
  const char* name;
  Spoil spoil;
};
class LyingExtents : public ScatteredModel, public ::testing::WithParamInterface<Lie> {};

TEST_P(LyingExtents, EndInASentence) {
  start_daemon({.spoil_model = GetParam().spoil});
  ASSERT_EQ(open_session(), MOECACHED_OK);
  EXPECT_EQ(open_model(), MOECACHED_E_VERSION);
  EXPECT_GT(std::string(moecached_last_error()).size(), 20u);
}

INSTANTIATE_TEST_SUITE_P(
    Lies, LyingExtents,
    ::testing::Values(Lie{"file", [](auto v) { v.extents[20].file = 2; }},
                      Lie{"beyond_the_file", [](auto v) { v.extents[20].offset = 1u << 30; }},
                      Lie{"wraps", [](auto v) { v.extents[20].offset = UINT64_MAX - 5; }},
                      Lie{"count", [](auto v) { v.model->n_extents -= 1; }},
                      Lie{"count_beyond_the_end", [](auto v) { v.model->n_extents = UINT32_MAX; }},
                      Lie{"first", [](auto v) { v.parts[1].first_extent = UINT32_MAX; }}),
    [](const auto& lie) { return lie.param.name; });

}  // namespace
}  // namespace moecached::client::test
