#include <fstream>
#include <sstream>

#include "daemon/config/settings.h"
#include "tests/unit/config/config_testing.h"

namespace moecached {
namespace {

class ExampleFile : public ConfigTest {};

TEST_F(ExampleFile, SaysExactlyTheDefaults) {
  // /run/moecached is the default under the unit; a user's own differs.
  ::setenv("RUNTIME_DIRECTORY", "/run/moecached", 1);
  const Result<Config> defaults = load("");
  const Result<Config> example = load_flags({"moecached", "--config", MOECACHED_EXAMPLE_CONFIG});
  ::unsetenv("RUNTIME_DIRECTORY");
  ASSERT_TRUE(defaults) << defaults.error().text;
  ASSERT_TRUE(example) << example.error().text;
  EXPECT_EQ(print_config(*example), print_config(*defaults));
}

TEST_F(ExampleFile, MentionsEverySetting) {
  std::stringstream text;
  text << std::ifstream(MOECACHED_EXAMPLE_CONFIG).rdbuf();
  for (const Setting& setting : settings()) {
    const std::size_t dot = setting.key.find('.');
    const std::string section = std::string("[").append(setting.key.substr(0, dot)).append("]\n");
    const std::string key = std::string(setting.key.substr(dot + 1)).append(" = ");
    EXPECT_NE(text.str().find(section), std::string::npos) << setting.key;
    EXPECT_NE(text.str().find(key), std::string::npos) << setting.key;
  }
}

}  // namespace
}  // namespace moecached
