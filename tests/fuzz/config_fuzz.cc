// Configuration: an input is a TOML file; or, behind a first byte '=', the value of every setting, and a
// policy and a tier string. What is accepted must be the same when it is printed and read again.
#include <vector>

#include "daemon/config/config.h"
#include "daemon/config/settings.h"
#include "daemon/config/tier_string.h"
#include "daemon/policy/registry.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

void try_file(std::span<const std::uint8_t> toml) {
  const UniqueFd file = file_of(std::as_bytes(toml));
  Config config;
  ConfigRequest request;
  request.config_file = path_of(file);
  std::vector<std::string> refused;
  const Result<Config> read = reload_config(config, request, &refused);
  if (!read) return check_fault(read.error());
  for (const std::string& text : refused) check_text(text);
}

// TOML and gRPC give UTF-8; a fault quotes what was given.
void try_value(std::string_view text) {
  if (for_people(text) != text) return;
  for (const Setting& setting : settings()) {
    Config config;
    if (const Status set = setting.set(config, text); !set) {
      check_fault(set.error());
      continue;
    }
    Config again;
    const std::string printed = setting.get(config);
    const Status set = setting.set(again, printed);
    if (!set) std::fprintf(stderr, "%s: %s\n", std::string(setting.key).c_str(), set.error().text.c_str());
    CHECK(set && setting.get(again) == printed);
  }
  if (const auto tiers = parse_tiers(text)) {
    for (const TierSetting& tier : *tiers) CHECK(find_setting(tier.key) != nullptr);
  } else {
    check_fault(tiers.error());
  }
  for (const PolicyShape shape :
       {PolicyShape{.n_experts = 1, .n_slots = 1}, PolicyShape{.n_experts = 32, .n_slots = 7}}) {
    if (const auto policy = make_policy(text, shape); !policy) check_fault(policy.error());
  }
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 0 && data[0] == '=') {
    moecached::fuzz::try_value({reinterpret_cast<const char*>(data) + 1, size - 1});
  } else {
    moecached::fuzz::try_file({data, size});
  }
  return 0;
}
