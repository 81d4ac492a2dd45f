// What most client tests start from: a model file, a fake daemon, a session, the model opened, one lane.
// Thread: the test's. Memory: closes everything in the order that the C header asks for.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "tests/unit/client/fake_daemon.h"
#include "tests/unit/client/test_model.h"

namespace moecached::client::test {

class ClientTest : public ::testing::Test {
 protected:
  explicit ClientTest(TestModel::Shape shape = {})
      : model_file_(std::move(shape)), socket_(folder_.path("handle.sock")) {}
  ~ClientTest() override {
    moecached_lane_close(lane_);
    moecached_model_close(model_);
    moecached_session_close(session_);
    ::unsetenv("MOECACHED_WAIT_MS");
  }

  void start_daemon(FakeOptions options = {}) {
    daemon_.reset();  // its socket goes first
    daemon_ = std::make_unique<FakeDaemon>(socket_, model_file_, std::move(options));
  }
  [[nodiscard]] moecached_status open_session() {
    return moecached_session_open(socket_.c_str(), "unit test", &session_);
  }
  [[nodiscard]] moecached_status open_model() {
    std::vector<const char*> paths;
    for (const std::string& path : model_file_.paths()) paths.push_back(path.c_str());
    return moecached_model_open(session_, paths.data(), paths.size(), &model_);
  }
  void open_all() {
    start_daemon();
    ASSERT_EQ(open_session(), MOECACHED_OK) << moecached_last_error();
    ASSERT_EQ(open_model(), MOECACHED_OK) << moecached_last_error();
    ASSERT_EQ(moecached_lane_open(model_, &lane_), MOECACHED_OK) << moecached_last_error();
  }

  [[nodiscard]] moecached_layer_info layer(std::uint32_t index) const {
    moecached_layer_info info{};
    EXPECT_EQ(moecached_model_layer(model_, index, &info), MOECACHED_OK);
    return info;
  }
  // One row of ids.
  [[nodiscard]] moecached_status resolve(std::uint32_t layer, const std::vector<std::int32_t>& ids) {
    slots_.assign(ids.size(), -99);
    return moecached_lane_resolve(lane_, layer, ids.data(), 1, ids.size(), ids.size() * sizeof(std::int32_t),
                                  slots_.data());
  }
  [[nodiscard]] bool slots_hold(std::uint32_t index, const std::vector<std::int32_t>& ids) const {
    const moecached_layer_info info = layer(index);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (!model_file_.slot_holds(info, index, slots_[i], ids[i])) return false;
    }
    return true;
  }
  [[nodiscard]] moecached_counters counters() const {
    moecached_counters values{};
    moecached_model_counters(model_, &values);
    return values;
  }

  TestModel model_file_;
  ScratchFolder folder_;
  std::string socket_;
  std::unique_ptr<FakeDaemon> daemon_;
  moecached_session* session_ = nullptr;
  moecached_model* model_ = nullptr;
  moecached_lane* lane_ = nullptr;
  std::vector<std::int32_t> slots_;  // of the last resolve()
};

}  // namespace moecached::client::test
