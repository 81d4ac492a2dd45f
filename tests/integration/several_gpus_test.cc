// One daemon, several GPUs of a machine (gpu_daemon_fixture.h; the driver of host memory has as many as it is
// told).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/gpu_daemon_fixture.h"

namespace moecached {
namespace {

class SeveralGpusTest : public GpuDaemonTest {
 protected:
  // Of the model on the GPU.
  ModelReport report_of(std::size_t gpu) {
    const std::string name = to_string(gpu_at(gpu));
    for (const ModelReport& model : daemon_->models()) {
      if (model.device == name) return model;
    }
    ADD_FAILURE() << "no model on " << name;
    return {};
  }

 private:
  const Variable two_{"SOFT_CUDA_DEVICES", "2"};  // until behind TearDown
};

TEST_F(SeveralGpusTest, TheirUuidsDiffer) {
  EXPECT_NE(to_string(gpu_at(0)), to_string(gpu_at(1)));
  start(kSix);
  std::size_t served = 0;
  for (const std::string& device : daemon_->status().devices) served += device.starts_with("GPU-") ? 1 : 0;
  EXPECT_EQ(served, 2u);
}

TEST_F(SeveralGpusTest, TheSecondReadsTheRamOfTheFirst) {
  start(kSix);
  GpuClient first(folder_, model_, 0);
  EXPECT_EQ(first.graphs(1, 5).wrong, 0u);
  const ModelReport before = report_of(0);
  EXPECT_GT(before.bytes_read, 0u);
  GpuClient second(folder_, model_, 1);
  EXPECT_EQ(second.graphs(2, 5).wrong, 0u);
  EXPECT_EQ(report_of(1).bytes_read, 0u);
  EXPECT_EQ(report_of(0).pool_bytes, before.pool_bytes);
  EXPECT_EQ(report_of(1).pool_bytes, 0u) << "held once, counted once";
}

TEST_F(SeveralGpusTest, RamThatIsHeldOnceCountsOnceForItsUser) {
  const auto open = [&](moecached_session* session, const std::filesystem::path& path, std::size_t gpu,
                        moecached_gpu_model** model) {
    const char* const files[] = {path.c_str()};
    const GpuId id = gpu_at(gpu);
    return moecached_gpu_model_open(session, files, 1, id.uuid.data(), model);
  };
  start(kSix);
  { const GpuClient measures(folder_, model_, 0); }
  max_user_bytes_ = report_of(0).pool_bytes;
  daemon_.reset();
  start(kSix);
  // Of one user, which has just room for one.
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  ASSERT_NE(second.lane(), nullptr);
  EXPECT_EQ(second.graphs(2, 5).wrong, 0u);
  const std::filesystem::path other = folder_ / "other.gguf";
  std::filesystem::copy_file(model_, other);
  moecached_gpu_model* refused = nullptr;
  EXPECT_NE(open(first.session(), other, 1, &refused), MOECACHED_OK);
  EXPECT_NE(std::string(moecached_last_error()).find("limits.user_bytes"), std::string::npos)
      << moecached_last_error();
}

TEST_F(SeveralGpusTest, TheSecondMayComeWhileTheFirstIsLoading) {
  start(kSix, 100, "ewma", /*slow_disk=*/true);
  GpuClient first(folder_, model_, 0), second(folder_, model_, 1);
  // Of the second, which waits for the first one's reads.
  EXPECT_EQ(second.graphs(2, 5).wrong, 0u);
  EXPECT_EQ(first.graphs(1, 5).wrong, 0u);
  EXPECT_EQ(report_of(1).bytes_read, 0u);
}

TEST_F(SeveralGpusTest, EachSwapsItsOwnSlots) {
  const Variable churn("MOECACHED_TEST_CHURN");
  start(kSix);
  std::atomic<std::size_t> wrong = 0;
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < 2; ++gpu) {
    threads.emplace_back([&, gpu] {
      GpuClient client(folder_, model_, gpu);
      GpuClient::Outcome out;
      EXPECT_TRUE(eventually([&] {
        out += client.graphs(static_cast<std::uint32_t>(gpu + 1), 20);
        return out.device_slots > 5000;
      }));
      wrong += out.wrong;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0u);
  for (std::size_t gpu = 0; gpu < 2; ++gpu) {
    EXPECT_GT(report_of(gpu).bytes_uploaded, 0u) << gpu;
    EXPECT_GT(report_of(gpu).device_bytes, 0u) << gpu;
  }
}

// To make room for the model on the second GPU the same model on the first one is dropped, whose RAM it is to
// use.
TEST_F(SeveralGpusTest, RamThatLostItsModelMeanwhileIsLoadedAllTheSame) {
  max_models_ = 1;
  start(kSix);
  {
    GpuClient first(folder_, model_, 0);
    ASSERT_TRUE(eventually([&] {  // one that is being grown is not dropped
      EXPECT_EQ(first.graphs(1, 5).wrong, 0u);
      return resident() > 0;
    }));
  }
  ASSERT_TRUE(eventually([&] { return daemon_->sessions().empty(); }));
  GpuClient second(folder_, model_, 1);
  EXPECT_EQ(second.graphs(2, 5).wrong, 0u);
  EXPECT_FALSE(report_of(1).loading);
  EXPECT_EQ(report_of(1).bytes_read, 0u);
}

TEST_F(SeveralGpusTest, RamOutlivesTheModelThatAllocatedIt) {
  start(kSix);
  auto first = std::make_unique<GpuClient>(folder_, model_, 0);
  EXPECT_EQ(first->graphs(1, 5).wrong, 0u);
  GpuClient second(folder_, model_, 1);
  EXPECT_EQ(second.graphs(2, 5).wrong, 0u);
  const std::uint32_t id = report_of(0).id;
  first.reset();
  ASSERT_TRUE(eventually([&] { return daemon_->drop_model(id).has_value(); }));
  EXPECT_EQ(second.graphs(3, 200).wrong, 0u);
  EXPECT_GT(report_of(1).pool_bytes, 0u);
}

}  // namespace
}  // namespace moecached
