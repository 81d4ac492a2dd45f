// What tests of models on a GPU start from: the soft CUDA driver, a fake daemon, a session, the model, a
// lane. "The GPU" is this process's CPU: device addresses are pointers. Thread: the test's. Memory: closes
// everything and checks that the driver got everything back.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "tests/support/soft_cuda/library.h"
#include "tests/unit/client/fake_daemon.h"
#include "tests/unit/client/test_model.h"

namespace moecached::client::test {

using ::moecached::test::SoftCuda;

class GpuClientTest : public ::testing::Test {
 protected:
  explicit GpuClientTest(TestModel::Shape shape = {})
      : model_file_(std::move(shape)), socket_(folder_.path("handle.sock")) {}
  ~GpuClientTest() override { close_all(); }

  void TearDown() override {
    close_all();
    EXPECT_EQ(cuda_.objects(), 0u) << "something was not given back to the driver";
    EXPECT_EQ(cuda_.current(), nullptr) << "a context was left current";
  }
  void close_all() {
    for (moecached_gpu_lane* lane : lanes_) moecached_gpu_lane_close(lane);
    lanes_.clear();
    moecached_gpu_model_close(model_);
    model_ = nullptr;
    moecached_session_close(session_);
    session_ = nullptr;
  }

  void start_daemon(FakeGpuOptions gpu = {}, std::uint64_t boot_epoch = 0x1234) {
    daemon_.reset();  // its socket goes first
    FakeOptions options;
    options.boot_epoch = boot_epoch;
    options.gpu = std::move(gpu);
    daemon_ = std::make_unique<FakeDaemon>(socket_, model_file_, std::move(options));
  }
  [[nodiscard]] moecached_status open_session() {
    return moecached_session_open(socket_.c_str(), "gpu test", &session_);
  }
  [[nodiscard]] moecached_status open_model(moecached_gpu_model** out) {
    std::vector<const char*> paths;
    for (const std::string& path : model_file_.paths()) paths.push_back(path.c_str());
    return moecached_gpu_model_open(session_, paths.data(), paths.size(), FakeGpuOptions{}.uuid.data(), out);
  }
  [[nodiscard]] moecached_gpu_lane* open_lane() {
    moecached_gpu_lane* lane = nullptr;
    EXPECT_EQ(moecached_gpu_lane_open(model_, &lane), MOECACHED_OK) << moecached_last_error();
    lanes_.push_back(lane);
    return lane;
  }
  void open_all(FakeGpuOptions gpu = {}) {
    start_daemon(std::move(gpu));
    ASSERT_EQ(open_session(), MOECACHED_OK) << moecached_last_error();
    ASSERT_EQ(open_model(&model_), MOECACHED_OK) << moecached_last_error();
    lane_ = open_lane();
  }

  [[nodiscard]] moecached_gpu_layer_info layer(std::uint32_t index) const {
    moecached_gpu_layer_info info{};
    EXPECT_EQ(moecached_gpu_model_layer(model_, index, &info), MOECACHED_OK);
    return info;
  }
  // As a kernel would: the slot from the table, then every part's bytes.
  [[nodiscard]] std::int32_t slot_of(std::uint32_t index, std::uint32_t expert) const {
    return reinterpret_cast<const std::int32_t*>(layer(index).table)[expert];
  }
  [[nodiscard]] bool holds(std::uint32_t index, std::uint32_t expert) const {
    const std::int32_t slot = slot_of(index, expert);
    if (slot < 0 || static_cast<std::uint32_t>(slot) >= layer(index).n_slots) return false;
    for (std::uint32_t p = 0; p < layer(index).n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0;
      if (moecached_gpu_model_part(model_, index, p, &part, &window) != MOECACHED_OK) return false;
      const auto* bytes =
          reinterpret_cast<const std::byte*>(window + static_cast<std::uint64_t>(slot) * part.expert_bytes);
      if (!model_file_.part_is(index, p, expert, bytes)) return false;
    }
    return true;
  }
  [[nodiscard]] bool holds_all() const {
    for (std::uint32_t l = 0; l < moecached_gpu_model_layers(model_); ++l) {
      for (std::uint32_t e = 0; e < layer(l).n_experts; ++e) {
        if (!holds(l, e)) return false;
      }
    }
    return true;
  }
  [[nodiscard]] moecached_shm_lane words(std::uint32_t lane = 0) const { return daemon_->lane_words(lane); }

  // Ends an epoch that used these slots in layers 0, 1, ... (n_layers rows of n_tokens * top-k).
  [[nodiscard]] moecached_status submit(moecached_gpu_lane* lane,
                                        const std::vector<std::vector<std::int32_t>>& rows,
                                        bool prefill = false) {
    const std::size_t row_ints = rows.empty() ? 0 : rows[0].size();
    const std::size_t pitch_ints = row_ints + 3;  // rows need not touch
    std::vector<std::int32_t> slots(rows.size() * pitch_ints + 1, -77);
    std::vector<std::uint16_t> layers;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::copy(rows[i].begin(), rows[i].end(), slots.begin() + static_cast<std::ptrdiff_t>(i * pitch_ints));
      layers.push_back(static_cast<std::uint16_t>(i));
    }
    moecached_gpu_submit request{};
    request.done_event = &event_;
    request.logged_event = &event_;
    request.slots = reinterpret_cast<std::uint64_t>(slots.data());
    request.layer_pitch_bytes = pitch_ints * sizeof(std::int32_t);
    request.layers = layers.data();
    request.n_layers = static_cast<std::uint32_t>(rows.size());
    request.n_tokens = static_cast<std::uint32_t>(row_ints / model_file_.shape().n_expert_used);
    request.is_prefill = prefill ? 1 : 0;
    return moecached_gpu_lane_submit(lane, &request);
  }
  void run_epoch(moecached_gpu_lane* lane, const std::vector<std::vector<std::int32_t>>& rows = {}) {
    ASSERT_EQ(moecached_gpu_lane_begin(lane), MOECACHED_OK) << moecached_last_error();
    ASSERT_EQ(submit(lane, rows), MOECACHED_OK) << moecached_last_error();
  }

  SoftCuda cuda_;
  TestModel model_file_;
  ScratchFolder folder_;
  std::string socket_;
  std::unique_ptr<FakeDaemon> daemon_;
  moecached_session* session_ = nullptr;
  moecached_gpu_model* model_ = nullptr;
  moecached_gpu_lane* lane_ = nullptr;  // the first of lanes_
  std::vector<moecached_gpu_lane*> lanes_;
  int event_ = 0;  // the soft driver looks at no more than the address
};

}  // namespace moecached::client::test
