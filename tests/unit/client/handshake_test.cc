// Opening: what the client tells the daemon, and daemons that speak another version, refuse, or talk
// nonsense. Each of these must end in a status and a sentence, never in a crash.
#include <functional>
#include <memory>

#include "tests/unit/client/client_fixture.h"

namespace moecached::client::test {
namespace {

class Handshake : public ClientTest {};

TEST_F(Handshake, TellsLabelAndOwnProcess) {
  start_daemon();
  ASSERT_EQ(open_session(), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(daemon_->label(), "unit test");
  EXPECT_TRUE(daemon_->got_pidfd_of_this_process());
  EXPECT_EQ(moecached_session_connected(session_), 1);
}

TEST_F(Handshake, LabelIsTheProgramsNameUnlessGivenAndIsCut) {
  start_daemon();
  ASSERT_EQ(moecached_session_open(socket_.c_str(), nullptr, &session_), MOECACHED_OK);
  EXPECT_EQ(daemon_->label(), "client_test");
  moecached_session_close(session_);
  start_daemon();
  ASSERT_EQ(moecached_session_open(socket_.c_str(), std::string(100, 'x').c_str(), &session_), MOECACHED_OK);
  EXPECT_EQ(daemon_->label(), std::string(63, 'x'));
}

TEST_F(Handshake, SocketComesFromTheEnvironmentUnlessGiven) {
  start_daemon();
  ::setenv("MOECACHED_SOCKET", socket_.c_str(), 1);
  const moecached_status status = moecached_session_open(nullptr, nullptr, &session_);
  ::unsetenv("MOECACHED_SOCKET");
  EXPECT_EQ(status, MOECACHED_OK) << moecached_last_error();
}

TEST_F(Handshake, NoDaemonIsUnavailable) {
  EXPECT_EQ(open_session(), MOECACHED_E_UNAVAILABLE);
  EXPECT_NE(std::string(moecached_last_error()).find(socket_), std::string::npos) << moecached_last_error();
  EXPECT_EQ(session_, nullptr);
}

TEST_F(Handshake, SocketPathThatNoSocketCanHaveIsAnArgument) {
  EXPECT_EQ(moecached_session_open(std::string(200, 'a').c_str(), nullptr, &session_), MOECACHED_E_ARGUMENT);
}

TEST_F(Handshake, DaemonThatNeverAnswersIsGivenUp) {
  ::setenv("MOECACHED_WAIT_MS", "30", 1);
  start_daemon({.silent = true});
  EXPECT_EQ(open_session(), MOECACHED_E_UNAVAILABLE);
}

TEST_F(Handshake, DescribesLayersAndParts) {
  open_all();
  EXPECT_EQ(moecached_model_layers(model_), 3u);
  const moecached_layer_info info = layer(2);
  EXPECT_EQ(info.block, 3u);
  EXPECT_EQ(info.n_experts, 16u);
  EXPECT_EQ(info.n_slots, 6u);
  EXPECT_EQ(info.n_parts, 3u);
  EXPECT_EQ(info.slot_stride, model_file_.slot_stride());
  // 6 slots end within 9 pages; private slots start at the next multiple of the stride, one for each expert.
  const std::uint64_t first_private = (model_file_.window_bytes() + info.slot_stride - 1) / info.slot_stride;
  EXPECT_EQ(info.n_window_slots, first_private + 16);
  std::uint32_t l = 9;
  std::uint32_t p = 9;
  ASSERT_EQ(moecached_model_find(model_, "blk.2.part_2.weight", &l, &p), MOECACHED_OK);
  EXPECT_EQ(l, 1u);
  EXPECT_EQ(p, 2u);
  moecached_part_info part{};
  ASSERT_EQ(moecached_model_part(model_, l, p, &part), MOECACHED_OK);
  EXPECT_STREQ(part.name, "blk.2.part_2.weight");
  EXPECT_EQ(part.expert_bytes, 4132u);
  EXPECT_EQ(part.file, 1u);
  EXPECT_EQ(part.file_offset, model_file_.file_offset(1, 2));
  EXPECT_EQ(part.slot_offset, model_file_.slot_offset(2));
  EXPECT_EQ(moecached_model_find(model_, "blk.2.attn_q.weight", &l, &p), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_model_part(model_, 0, 3, &part), MOECACHED_E_ARGUMENT);
  moecached_layer_info none{};
  EXPECT_EQ(moecached_model_layer(model_, 3, &none), MOECACHED_E_ARGUMENT);
}

TEST_F(Handshake, FilesThatCannotBeReadAreNamed) {
  start_daemon();
  ASSERT_EQ(open_session(), MOECACHED_OK);
  const char* missing = "/no/such/model.gguf";
  EXPECT_EQ(moecached_model_open(session_, &missing, 1, &model_), MOECACHED_E_ARGUMENT);
  EXPECT_NE(std::string(moecached_last_error()).find(missing), std::string::npos);
  const char* folder = "/tmp";
  EXPECT_EQ(moecached_model_open(session_, &folder, 1, &model_), MOECACHED_E_ARGUMENT);
  EXPECT_EQ(moecached_model_open(session_, nullptr, 0, &model_), MOECACHED_E_ARGUMENT);
}

TEST_F(Handshake, RefusalsCarryTheDaemonsWords) {
  start_daemon({.refuse_hello_with = MOECACHED_ERROR_LIMIT});
  EXPECT_EQ(open_session(), MOECACHED_E_REFUSED);
  EXPECT_NE(std::string(moecached_last_error()).find("no room for this session"), std::string::npos);
  start_daemon({.refuse_hello_with = MOECACHED_ERROR_VERSION});
  EXPECT_EQ(open_session(), MOECACHED_E_VERSION);
  start_daemon({.refuse_model_with = MOECACHED_ERROR_BUDGET});
  ASSERT_EQ(open_session(), MOECACHED_OK);
  EXPECT_EQ(open_model(), MOECACHED_E_REFUSED);
  EXPECT_NE(std::string(moecached_last_error()).find("this model is of no use"), std::string::npos);
  EXPECT_EQ(moecached_session_connected(session_), 1) << "a refused model leaves the session as it is";
}

TEST_F(Handshake, LanesAreReportedAndLimited) {
  start_daemon({.n_lanes = 2});
  ASSERT_EQ(open_session(), MOECACHED_OK) << moecached_last_error();
  ASSERT_EQ(open_model(), MOECACHED_OK) << moecached_last_error();
  ASSERT_EQ(moecached_lane_open(model_, &lane_), MOECACHED_OK);
  moecached_lane* second = nullptr;
  moecached_lane* third = nullptr;
  ASSERT_EQ(moecached_lane_open(model_, &second), MOECACHED_OK);
  daemon_->wait_for_open_lanes(2);
  EXPECT_EQ(daemon_->lane_words(1).model_id, 5u);
  EXPECT_EQ(moecached_lane_open(model_, &third), MOECACHED_E_REFUSED);
  EXPECT_EQ(third, nullptr);
  moecached_lane_close(second);
  daemon_->wait_for_open_lanes(1);
  ASSERT_EQ(moecached_lane_open(model_, &third), MOECACHED_OK);
  moecached_lane_close(third);
}

TEST_F(Handshake, EpochsGoOnWhenALaneBlockIsUsedAgain) {
  open_all();
  daemon_->make_resident(0, {1});
  for (int i = 0; i < 5; ++i) ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  const std::uint64_t before = daemon_->lane_words(0).begun >> 16;
  moecached_lane_close(lane_);
  lane_ = nullptr;
  daemon_->wait_for(MOECACHED_RECORD_ROUTE, 5);
  ASSERT_EQ(moecached_lane_open(model_, &lane_), MOECACHED_OK);
  ASSERT_EQ(resolve(0, {1}), MOECACHED_OK);
  EXPECT_GT(daemon_->lane_words(0).begun >> 16, before);
  EXPECT_EQ(counters().lookups, 6u) << "counters of closed lanes stay";
}

// One lie each; `name` says which, `spoil` tells it.
struct Lie {
  const char* name;
  FakeOptions options;
};

FakeOptions session_lie(std::function<void(moecached_shm_header&, moecached_shm_session&)> spoil) {
  FakeOptions options;
  options.spoil_session = std::move(spoil);
  return options;
}
FakeOptions welcome_lie(std::function<void(moecached_handle_welcome&)> spoil) {
  FakeOptions options;
  options.spoil_welcome = std::move(spoil);
  return options;
}
FakeOptions model_lie(std::function<void(ModelSegmentView)> spoil) {
  FakeOptions options;
  options.spoil_model = std::move(spoil);
  return options;
}
FakeOptions opened_lie(std::function<void(moecached_handle_model_opened&)> spoil) {
  FakeOptions options;
  options.spoil_opened = std::move(spoil);
  return options;
}

class LyingDaemon : public ClientTest, public ::testing::WithParamInterface<Lie> {};

TEST_P(LyingDaemon, EndsInASentence) {
  start_daemon(GetParam().options);
  moecached_status status = open_session();
  if (status == MOECACHED_OK) status = open_model();
  EXPECT_EQ(status, MOECACHED_E_VERSION);
  EXPECT_GT(std::string(moecached_last_error()).size(), 20u);
  EXPECT_EQ(model_, nullptr);
}

INSTANTIATE_TEST_SUITE_P(
    Messages, LyingDaemon,
    ::testing::Values(Lie{"magic", welcome_lie([](auto& m) { m.header.magic = 1; })},
                      Lie{"version", welcome_lie([](auto& m) { m.header.version = 2; })},
                      Lie{"type",
                          welcome_lie([](auto& m) { m.header.type = MOECACHED_HANDLE_MODEL_OPENED; })},
                      Lie{"bytes", welcome_lie([](auto& m) { m.header.bytes += 8; })},
                      Lie{"n_fds", welcome_lie([](auto& m) { m.header.n_fds = 3; })},
                      Lie{"boot_epoch", welcome_lie([](auto& m) { m.boot_epoch ^= 1; })},
                      Lie{"session_id", welcome_lie([](auto& m) { m.session_id ^= 1; })},
                      Lie{"session_too_large", welcome_lie([](auto& m) { m.session_bytes += 1 << 20; })},
                      Lie{"session_too_small", welcome_lie([](auto& m) { m.session_bytes = 64; })},
                      Lie{"session_empty", welcome_lie([](auto& m) { m.session_bytes = 0; })},
                      Lie{"model_id", opened_lie([](auto& m) { m.model_id = 6; })},
                      Lie{"model_too_large", opened_lie([](auto& m) { m.model_bytes = UINT64_MAX; })},
                      Lie{"model_too_small", opened_lie([](auto& m) { m.model_bytes = 100; })},
                      Lie{"pool_too_large", opened_lie([](auto& m) { m.pool_bytes += 4096; })},
                      Lie{"pool_too_small", opened_lie([](auto& m) { m.pool_bytes -= 4096; })},
                      Lie{"stream_too_small", opened_lie([](auto& m) { m.stream_bytes -= 4096; })}),
    [](const auto& lie) { return lie.param.name; });

INSTANTIATE_TEST_SUITE_P(
    SessionSegment, LyingDaemon,
    ::testing::Values(Lie{"magic", session_lie([](auto& h, auto&) { h.magic ^= 1; })},
                      Lie{"version", session_lie([](auto& h, auto&) { h.version = 99; })},
                      Lie{"kind", session_lie([](auto& h, auto&) { h.kind = MOECACHED_SEGMENT_MODEL; })},
                      Lie{"bytes", session_lie([](auto& h, auto&) { h.bytes = 1u << 30; })},
                      Lie{"boot_epoch", session_lie([](auto& h, auto&) { h.boot_epoch ^= 1; })},
                      Lie{"no_lanes", session_lie([](auto&, auto& s) { s.n_lanes = 0; })},
                      Lie{"many_lanes", session_lie([](auto&, auto& s) { s.n_lanes = 17; })},
                      Lie{"ring", session_lie([](auto&, auto& s) { s.ring_records = 1024; })},
                      Lie{"stride", session_lie([](auto&, auto& s) { s.lane_stride += 64; })},
                      Lie{"offset", session_lie([](auto&, auto& s) { s.lanes_offset = UINT64_MAX - 63; })},
                      Lie{"alignment", session_lie([](auto&, auto& s) { s.lanes_offset = 100; })}),
    [](const auto& lie) { return lie.param.name; });

INSTANTIATE_TEST_SUITE_P(
    ModelSegment, LyingDaemon,
    ::testing::Values(
        Lie{"version", model_lie([](auto v) { v.header->version = 0; })},
        Lie{"boot_epoch", model_lie([](auto v) { v.header->boot_epoch = 0; })},
        Lie{"no_layers", model_lie([](auto v) { v.model->n_layers = 0; })},
        Lie{"many_layers", model_lie([](auto v) { v.model->n_layers = 4097; })},
        Lie{"layers_beyond_the_end", model_lie([](auto v) { v.model->n_layers = 4000; })},
        Lie{"layers_offset", model_lie([](auto v) { v.model->layers_offset = UINT64_MAX - 7; })},
        Lie{"parts_offset", model_lie([](auto v) { v.model->parts_offset = 1 << 20; })},
        Lie{"parts_alignment", model_lie([](auto v) { v.model->parts_offset += 4; })},
        Lie{"table_offset", model_lie([](auto v) { v.model->table_offset += 4; })},
        Lie{"n_files", model_lie([](auto v) { v.model->n_files = 1; })},
        Lie{"name", model_lie([](auto v) { std::fill_n(v.model->name, 256, 'x'); })},
        Lie{"pool_bytes", model_lie([](auto v) { v.model->pool_bytes += 1; })},
        Lie{"stream_bytes", model_lie([](auto v) { v.model->stream_bytes_per_lane *= 2; })},
        Lie{"stream_half_too_small", model_lie([](auto v) { v.model->stream_bytes_per_lane = 8192; })},
        Lie{"no_experts", model_lie([](auto v) { v.layers[1].n_experts = 0; })},
        Lie{"many_experts", model_lie([](auto v) { v.layers[1].n_experts = 4097; })},
        Lie{"no_slots", model_lie([](auto v) { v.layers[1].n_slots = 0; })},
        Lie{"no_open_slots", model_lie([](auto v) { v.layers[1].n_slots_open = 0; })},
        Lie{"more_open_slots_than_slots", model_lie([](auto v) { v.layers[1].n_slots_open = 1000; })},
        Lie{"more_slots_than_experts", model_lie([](auto v) { v.layers[1].n_slots = 17; })},
        Lie{"no_parts", model_lie([](auto v) { v.layers[1].n_parts = 0; })},
        Lie{"many_parts", model_lie([](auto v) { v.layers[1].n_parts = 9; })},
        Lie{"first_part", model_lie([](auto v) { v.layers[1].first_part = UINT32_MAX; })},
        Lie{"table_first", model_lie([](auto v) { v.layers[1].table_first = UINT32_MAX; })},
        Lie{"window_alignment", model_lie([](auto v) { v.layers[1].window_offset += 512; })},
        Lie{"window_beyond_the_pool", model_lie([](auto v) { v.layers[2].window_offset += 4096; })},
        Lie{"window_wraps", model_lie([](auto v) { v.layers[2].window_offset = UINT64_MAX - 4095; })},
        Lie{"window_too_small", model_lie([](auto v) { v.layers[2].window_bytes = 4096; })},
        Lie{"no_stride", model_lie([](auto v) { v.layers[2].slot_stride = 0; })},
        Lie{"stride_wraps", model_lie([](auto v) { v.layers[2].slot_stride = UINT64_MAX / 2; })},
        Lie{"part_beyond_the_slot", model_lie([](auto v) { v.parts[2].slot_offset += 4096; })},
        Lie{"part_wraps", model_lie([](auto v) { v.parts[2].slot_offset = UINT64_MAX - 1; })},
        Lie{"part_empty", model_lie([](auto v) { v.parts[2].expert_bytes = 0; })},
        Lie{"part_of_no_file", model_lie([](auto v) { v.parts[2].file = 2; })},
        Lie{"part_beyond_the_file", model_lie([](auto v) { v.parts[2].file_offset = 1u << 30; })},
        Lie{"part_name", model_lie([](auto v) { std::fill_n(v.parts[2].name, 72, 'x'); })}),
    [](const auto& lie) { return lie.param.name; });

TEST_F(Handshake, AnotherVersionsSentenceNamesBoth) {
  start_daemon(session_lie([](auto& header, auto&) { header.version = 99; }));
  ASSERT_EQ(open_session(), MOECACHED_E_VERSION);
  const std::string sentence = moecached_last_error();
  EXPECT_NE(sentence.find("version 99"), std::string::npos) << sentence;
  EXPECT_NE(sentence.find("version " + std::to_string(MOECACHED_SHM_VERSION)), std::string::npos) << sentence;
}

}  // namespace
}  // namespace moecached::client::test
