#include "client/ctl/run_plan.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <regex>

namespace moecached::ctl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kOverride = "\\.ffn_(gate|up|down|gate_up)_exps=MOECACHE";

TEST(ExtraFlags, LlamaProgramsGetTheOverride) {
  for (const char* program : {"llama-server", "/opt/bin/llama-cli", "./llama", "llama-bench"}) {
    EXPECT_THAT(extra_flags({program, "-m", "x.gguf"}, ""), ElementsAre("-ot", kOverride)) << program;
  }
}

TEST(ExtraFlags, OtherProgramsGetNone) {
  for (const char* program :
       {"node", "/usr/bin/python3", "ollama", "llamafile", "llama-quantize", "/x/llama-gguf-split"}) {
    EXPECT_THAT(extra_flags({program, "-m", "x.gguf"}, ""), IsEmpty()) << program;
  }
}

TEST(ExtraFlags, TheUsersOwnOverrideIsEnough) {
  EXPECT_THAT(extra_flags({"llama-server", "-ot", "exps=MOECACHE"}, ""), IsEmpty());
  EXPECT_THAT(extra_flags({"llama-server", "--override-tensor", "a=CPU,exps=MOECACHE", "-v"}, ""), IsEmpty());
  EXPECT_THAT(extra_flags({"llama-server"}, "exps=MOECACHE"), IsEmpty());
}

TEST(ExtraFlags, AnotherOverrideOfTheUserIsNot) {
  EXPECT_THAT(extra_flags({"llama-server", "-ot", "attn=CPU"}, ""), ElementsAre("-ot", kOverride));
  EXPECT_THAT(extra_flags({"llama-server", "-p", "MOECACHE"}, "attn=CPU"), ElementsAre("-ot", kOverride));
  EXPECT_THAT(extra_flags({"llama-server", "-ot"}, ""), ElementsAre("-ot", kOverride));
}

// -ot matches anywhere in the name, so the biases of gpt-oss go along with their weights.
TEST(ExtraFlags, TheOverrideMatchesWeightsAndBiasesOfExpertsAndNothingElse) {
  const std::string flag = extra_flags({"llama-cli"}, "").at(1);
  const std::regex pattern(flag.substr(0, flag.find('=')));
  for (const char* name : {"blk.0.ffn_gate_exps.weight", "blk.17.ffn_down_exps.bias",
                           "blk.3.ffn_gate_up_exps.weight", "blk.3.ffn_up_exps.bias"}) {
    EXPECT_TRUE(std::regex_search(name, pattern)) << name;
  }
  for (const char* name :
       {"blk.0.ffn_gate_inp.weight", "blk.0.ffn_up_shexp.weight", "blk.0.ffn_down.weight"}) {
    EXPECT_FALSE(std::regex_search(name, pattern)) << name;
  }
}

TEST(DaemonArguments, AreTheDaemonsFlags) {
  EXPECT_THAT(daemon_arguments({}), IsEmpty());
  EXPECT_THAT(daemon_arguments({.pool_bytes = "4GiB", .slots = "25%", .policy = "lru"}),
              ElementsAre("--pool-bytes=4GiB", "--pool-slots=25%", "--policy-default=lru"));
  EXPECT_THAT(daemon_arguments({.tiers = "RAM:lfu:8,SSD:stream"}),
              ElementsAre("--tiers=RAM:lfu:8,SSD:stream"));
  EXPECT_THAT(daemon_arguments({.gpu_slots = "16", .gpu_bytes = "8GiB", .gpu_keep_free = "1GiB"}),
              ElementsAre("--gpu-slots=16", "--gpu-bytes=8GiB", "--gpu-keep-free=1GiB"));
  EXPECT_THAT(daemon_arguments({.gpu_policy = "ewma:decay=950", .gpu_max_slowdown = "0"}),
              ElementsAre("--gpu-policy=ewma:decay=950", "--gpu-max-slowdown=0"));
}

TEST(DaemonArguments, AreNamedWhenTheyCannotBeUsed) {
  EXPECT_EQ(given_options({}), "");
  EXPECT_EQ(given_options({.gpu_bytes = "8GiB"}), "--gpu-bytes");
  EXPECT_EQ(given_options({.slots = "8", .gpu_slots = "16", .gpu_keep_free = "1GiB"}),
            "--slots, --gpu-slots and --gpu-keep-free");
  EXPECT_EQ(given_options({.gpu_policy = "lru", .gpu_max_slowdown = "10"}),
            "--gpu-policy and --gpu-max-slowdown");
}

TEST(WithEnvironment, ReplacesAddsAndRemoves) {
  const char* const before[] = {"A=1", "AB=2", "C=3", "D", nullptr};
  EXPECT_THAT(with_environment(before, {"A=9", "E=5"}, {"C"}), ElementsAre("AB=2", "D", "A=9", "E=5"));
}

class Searches : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"PATH", "MOECACHED_PLUGIN", "MOECACHED_DAEMON"}) {
      const char* value = std::getenv(name);
      saved_.emplace_back(name, value == nullptr ? std::nullopt : std::optional<std::string>(value));
    }
    ::unsetenv("MOECACHED_PLUGIN");
    ::unsetenv("MOECACHED_DAEMON");
    char pattern[] = "/tmp/moecached-plan-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    root_ = pattern;
  }
  void TearDown() override {
    std::filesystem::remove_all(root_);
    for (const auto& [name, value] : saved_) {
      if (value) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
    }
  }
  std::string make(const std::string& name, mode_t mode) {
    const std::string path = root_ + "/" + name;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path) << "#!/bin/sh\n";
    ::chmod(path.c_str(), mode);
    return path;
  }
  std::string root_;
  std::vector<std::pair<std::string, std::optional<std::string>>> saved_;
};

TEST_F(Searches, ThePluginIsFoundInInstalledAndBuildTrees) {
  std::filesystem::create_directories(root_ + "/client/ctl");
  const std::string built = make("shim/ggml/libggml-moecache.so", 0644);
  EXPECT_EQ(find_plugin("", root_ + "/client/ctl").found, built);
  std::filesystem::create_directories(root_ + "/bin");
  const std::string library = make("lib/libggml-moecache.so", 0644);
  EXPECT_EQ(find_plugin("", root_ + "/bin").found, library);
  const std::string installed = make("lib/moecached/libggml-moecache.so", 0644);
  EXPECT_EQ(find_plugin("", root_ + "/bin").found, installed);
  const std::string beside = make("bin/libggml-moecache.so", 0644);
  EXPECT_EQ(find_plugin("", root_ + "/bin").found, beside);
  const std::string named = make("elsewhere.so", 0644);
  ::setenv("MOECACHED_PLUGIN", named.c_str(), 1);
  EXPECT_EQ(find_plugin("", root_ + "/bin").found, named);
}

TEST_F(Searches, AGivenPluginIsNotReplacedByAnother) {
  make("bin/libggml-moecache.so", 0644);
  const PluginSearch search = find_plugin(root_ + "/missing.so", root_ + "/bin");
  EXPECT_EQ(search.found, "");
  EXPECT_THAT(search.looked_at, HasSubstr("missing.so"));
}

TEST_F(Searches, ProgramsAreFoundAsTheShellWould) {
  const std::string tool = make("b/tool", 0755);
  ::setenv("PATH", (root_ + "/a:" + root_ + "/b").c_str(), 1);
  EXPECT_EQ(find_program("tool").path, tool);
  EXPECT_EQ(find_program(tool).path, tool);
  EXPECT_EQ(find_program("other").error_number, ENOENT);
  EXPECT_EQ(find_program(root_ + "/b").error_number, ENOENT) << "a folder is no program";
  make("a/tool", 0644);
  EXPECT_EQ(find_program("tool").path, tool) << "a file without the right is passed over";
  make("a/data", 0644);
  EXPECT_EQ(find_program("data").error_number, EACCES);
}

TEST_F(Searches, TheDaemonIsTheOneBesideMoecachectl) {
  const std::string in_path = make("path/moecached", 0755);
  ::setenv("PATH", (root_ + "/path").c_str(), 1);
  EXPECT_EQ(find_daemon(root_ + "/bin"), in_path);
  const std::string beside = make("bin/moecached", 0755);
  EXPECT_EQ(find_daemon(root_ + "/bin"), beside);
  ::setenv("MOECACHED_DAEMON", in_path.c_str(), 1);
  EXPECT_EQ(find_daemon(root_ + "/bin"), in_path);
  ::setenv("MOECACHED_DAEMON", "/missing", 1);
  EXPECT_EQ(find_daemon(root_ + "/bin"), "");
}

}  // namespace
}  // namespace moecached::ctl
