// The plugin's table and layout probe on real llama.cpp libraries.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "shim/ggml/abi_guard.h"
#include "shim/ggml/host_api.h"

namespace moecached::shim {
namespace {

class HostLibsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    open_library("libggml-base");
    open_library("libggml-cpu");
    void* ggml = open_library("libggml");
    ASSERT_NE(ggml, nullptr) << "no libggml in " << LLAMA_LIBS;
    load_all_ = reinterpret_cast<decltype(load_all_)>(dlsym(ggml, "ggml_backend_load_all_from_path"));
    load_all_(LLAMA_LIBS);
  }

  // RTLD_LOCAL, as node does it.
  static void* open_library(const std::string& stem) {
    for (const auto& entry : std::filesystem::directory_iterator(LLAMA_LIBS)) {
      const std::string name = entry.path().filename().string();
      if (name == stem + ".so" || name.starts_with(stem + ".v"))
        return dlopen(entry.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    return nullptr;
  }

  inline static void (*load_all_)(const char*) = nullptr;
};

TEST_F(HostLibsTest, FindsEveryFunctionThroughTheCallerOrThroughLoadedLibraries) {
  EXPECT_EQ(resolve_host_api(reinterpret_cast<const void*>(load_all_)), "");
  EXPECT_STREQ(host().ggml_version(), "0.25.1");
  set_host_api({});
  EXPECT_EQ(resolve_host_api(nullptr), "");
  EXPECT_NE(host().ggml_version, nullptr);
}

TEST_F(HostLibsTest, KnowsTheBuildAndItsLayout) {
  ASSERT_EQ(resolve_host_api(reinterpret_cast<const void*>(load_all_)), "");
  EXPECT_EQ(judge_build(host().ggml_version(), host().ggml_commit(), ""), BuildVerdict::kKnown);
  EXPECT_EQ(probe_layout(), "");
}

TEST_F(HostLibsTest, SeesADifferentLayout) {
  ASSERT_EQ(resolve_host_api(reinterpret_cast<const void*>(load_all_)), "");
  HostApi other = host();
  other.ggml_tensor_overhead = []() -> std::size_t { return sizeof(ggml_tensor) + 40; };
  set_host_api(other);
  EXPECT_NE(probe_layout(), "");
  other.ggml_op_name = [](ggml_op) { return "MUL_MAT"; };
  ASSERT_EQ(resolve_host_api(reinterpret_cast<const void*>(load_all_)), "");
  other.ggml_tensor_overhead = host().ggml_tensor_overhead;
  set_host_api(other);
  EXPECT_EQ(probe_layout(), "operations are numbered differently");
}

}  // namespace
}  // namespace moecached::shim
