// Loads configurations from text and flags, away from the file and the environment of the machine that runs
// the test.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "daemon/config/config.h"

namespace moecached {

class ConfigTest : public testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("RUNTIME_DIRECTORY");
    char pattern[] = "/tmp/moecached-config-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern), nullptr);
    directory_ = pattern;
  }
  void TearDown() override {
    ::unlink(file().c_str());
    ::rmdir(directory_.c_str());
  }

  [[nodiscard]] std::string file() const { return directory_ + "/moecached.toml"; }
  void write(const std::string& text) const { std::ofstream(file(), std::ios::trunc) << text; }

  Result<Config> load(const std::string& toml, std::vector<std::string> flags = {}) {
    write(toml);
    flags.insert(flags.begin(), {"moecached", "--config", file()});
    return load_flags(flags);
  }
  Result<Config> load_flags(const std::vector<std::string>& arguments) {
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    return load_config(static_cast<int>(argv.size()), argv.data(), &request_);
  }
  // The text of the error; a success is a failed test.
  std::string error(const std::string& toml, const std::vector<std::string>& flags = {}) {
    const Result<Config> config = load(toml, flags);
    if (config) {
      ADD_FAILURE() << "accepted: " << toml << (flags.empty() ? "" : flags.front());
      return "";
    }
    EXPECT_EQ(config.error().code, FaultCode::kInvalid);
    return config.error().text;
  }

  std::string directory_;
  ConfigRequest request_;
};

}  // namespace moecached
