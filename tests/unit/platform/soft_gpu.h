// What tests of gpu.h start from: the soft driver and its one GPU, whose device addresses are pointers. At
// the end the driver must have everything back, and no context may be left current. Thread: the test's.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/platform/gpu.h"
#include "tests/support/soft_cuda/library.h"

namespace moecached {

// Environment of the driver, for a scope.
class EnvironmentVariable {
 public:
  EnvironmentVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, value, 1);
  }
  ~EnvironmentVariable() {
    if (before_) {
      ::setenv(name_, before_->c_str(), 1);
    } else {
      ::unsetenv(name_);
    }
  }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

class SoftGpuTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kGranularity = 2u << 20;

  void SetUp() override {
    ASSERT_EQ(cuda_.objects(), 0u) << "left by the test before";
    gpu_ = first_gpu();
    ASSERT_NE(gpu_, nullptr);
  }
  void TearDown() override {
    gpu_.reset();
    EXPECT_EQ(cuda_.objects(), 0u) << "something was not given back to the driver";
    EXPECT_EQ(cuda_.vram_used(), 0u);
    EXPECT_EQ(cuda_.current(), nullptr) << "a context was left current";
  }
  static std::unique_ptr<Gpu> first_gpu() {
    std::string reason;
    auto gpus = list_gpus(&reason);
    EXPECT_EQ(gpus.size(), 1u) << reason;
    return gpus.empty() ? nullptr : std::move(gpus.front());
  }
  std::unique_ptr<GpuRange> backed_range(std::uint64_t bytes) {
    auto range = gpu_->reserve(bytes);
    EXPECT_TRUE(range) << range.error().text;
    const Status grown = (*range)->grow(0, bytes);
    EXPECT_TRUE(grown) << grown.error().text;
    return *std::move(range);
  }
  std::unique_ptr<GpuHostMemory> host_memory(std::uint64_t bytes) {
    auto memory = gpu_->create_host_memory(bytes);
    EXPECT_TRUE(memory) << memory.error().text;
    return *std::move(memory);
  }
  static std::byte* device(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }  // NOLINT

  test::SoftCuda cuda_;
  std::unique_ptr<Gpu> gpu_;
};

}  // namespace moecached
